//! The fence without HTTP.

mod abandoned;
mod admission;
mod begin_hook;
mod commit;
mod connections;
mod database;
mod migration;
mod pool_hooks;
mod pressure;
mod raise;
mod reset;
mod schema;
mod shortage;
mod write;
