//! The issuer over real HTTP.

mod calls;
mod operators;
mod refusals;
mod service;
mod signed;
mod waiting;
