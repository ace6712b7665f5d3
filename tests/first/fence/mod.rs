//! The fence without HTTP.

mod abandoned;
mod admission;
mod begun_early;
mod busy_timeout;

mod commit;
mod cut_off;
mod database;
mod epochs_above;
mod failover;
mod failover_operator;
mod failover_pool;
mod failover_reads;
mod floors;
mod functions;
mod given_up;
mod idle;
mod in_between;
mod kept;
mod left_open;

mod pool_hooks;
mod protection;
mod protection_attacks;
mod protection_fuzz;
mod protection_rights;
mod protection_tables;
mod raise;
mod reset;

mod schema_sql;
mod sessions;
mod sqlstates;
mod write;
