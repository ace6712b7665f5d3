//! The tests that need servers. `tests/run` starts them.
//!
//! One suite runs over both databases of the fence, and one over every
//! lease store.

mod support;

mod abandoned;
mod announced;
mod cancellation;
mod connections;
mod deferred;
mod exclusion;
mod fence;
mod fence_hook;
mod fenced_read;
mod guard;
mod holder;
mod hooks;
mod http_leases;
mod idempotency;
mod inventory;
mod issuer;
mod known_epochs;
mod layer;
mod lease_owner;
mod leases;
mod lost_answers;
mod lost_update;
mod on_begin;
mod outages;
mod path_names;
mod pressure;
mod redis_cluster;
mod redis_contact;
mod redis_epochs;
mod redis_history;
mod redis_line;
mod redis_loss;
mod redis_memory;
mod repeated;
mod reset;
mod schema;
mod several;
mod shortage;
mod time_limit;
mod turned_away;
mod worker;
mod write;
