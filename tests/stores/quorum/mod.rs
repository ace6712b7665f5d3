//! Leases in a quorum of Redis servers.

mod attempts;
mod clean_up;
mod epochs;
mod faults;
mod list;
mod load;
mod naive;
mod nodes;
mod others;
mod pauses;
mod renewals;
mod trips;
mod waiting;
