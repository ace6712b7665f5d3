//! The tests that need servers. `tests/run` starts them.
//!
//! One suite runs over both databases of the fence, and one over every
//! lease store.

mod support;

mod announced;
mod cancellation;
mod connections;
mod deferred;
mod exclusion;
mod fence;
mod guard;
mod holder;
mod http_leases;
mod idempotency;
mod inventory;
mod issuer;
mod layer;
mod leases;
mod lost_answers;
mod lost_update;
mod outages;
mod pressure;
mod redis_cluster;
mod redis_epochs;
mod redis_history;
mod redis_line;
mod redis_loss;
mod redis_memory;
mod repeated;
mod several;
mod shortage;
mod worker;
mod write;
