//! The tests that need servers. `tests/run` starts them.
//!
//! One suite runs over both databases of the fence, and one over both lease stores.

mod support;

mod cancellation;
mod exclusion;
mod fence;
mod idempotency;
mod inventory;
mod issuer;
mod layer;
mod leases;
mod lost_answers;
mod redis_cluster;
mod redis_epochs;
mod redis_history;
mod redis_line;
mod redis_loss;
mod repeated;
mod several;
