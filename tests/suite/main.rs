//! The tests that need servers. `tests/run` starts them.
//!
//! One suite runs over both databases of the fence, and one over every
//! lease store.

mod client;
mod example;
mod failures;
mod fence;
mod issuer;
mod layer;
mod lease;
mod support;
