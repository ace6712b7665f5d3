//! The issuer over real HTTP, where its store makes no difference. What it answers over each is in `every_store`.

mod closing;
mod signed;
