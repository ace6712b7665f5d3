//! The issuer over real HTTP, for behaviour that does not depend on the store. Its answers with
//! each store are tested in `every_store`.

mod closing;
mod operators;
mod refusals;
mod signed;
