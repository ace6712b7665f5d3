//! The servers of a run, which it may freeze, kill and lose: Postgres, PgBouncer, those of the lease store, and three
//! services.

pub mod database;
pub mod leases;
pub mod services;
