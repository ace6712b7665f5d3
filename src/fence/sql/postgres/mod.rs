//! Implementation of the fence in Postgres.
//!
//! The SQL functions in `migrations/postgres` implement the rules of the fence. To admit the token
//! of a resource that has a row, the fence sends one prepared `UPDATE`. If the `UPDATE` admits no
//! token, and for every other operation, the fence calls a function.

mod admit;
mod keys;
mod setup;
mod single;
mod tables;
mod transaction;
