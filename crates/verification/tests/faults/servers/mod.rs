//! The servers of a run: Postgres, PgBouncer, the servers of the lease store, and three services.
//! Faults freeze, kill and replace them.

pub mod database;
pub mod leases;
pub mod services;
