//! The lease stores.

mod announced;
mod announced_above;
mod grant_load;
mod grants;
mod line;
mod owner;
mod postgres_durable;
mod postgres_functions;
mod postgres_idle;
mod postgres_line;
mod postgres_locks;
mod postgres_processes;
mod quorum_scripts;
mod quorum_scripts_ends;
mod quorum_scripts_loss;
mod redis_cluster;
mod redis_contact;
mod redis_epochs;
mod redis_failover;
mod redis_history;
mod redis_line;
mod redis_line_loss;
mod redis_loss;
mod redis_memory;
mod redis_secrets;
