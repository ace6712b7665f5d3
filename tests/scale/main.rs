//! A fence on Citus, an extension that distributes the tables of a Postgres database over several
//! servers.

mod commit;
mod distributed;
mod failover;
mod http;
mod leases;
mod protection;
mod race;
mod suite;

#[macro_use]
extern crate tower_fence_tests as support;
