//! The fence without HTTP.

mod abandoned;
mod admission;
mod begin_hook;
mod capabilities;
mod collisions;
mod commit;
mod connections;
mod database;
mod failover;
mod floors;
mod floors_load;
mod functions;
mod migration;
mod pool_hooks;
mod pressure;
mod protection;
mod protection_attacks;
mod protection_fuzz;
mod protection_rights;
mod protection_tables;
mod raise;
mod reset;
mod schema;
mod schema_sql;
mod shortage;
mod write;
