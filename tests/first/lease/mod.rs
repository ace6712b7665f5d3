//! The lease stores.

mod announced;
mod announced_above;
mod displaced;
mod pages;
mod postgres_functions;
mod postgres_idle;
mod postgres_locks;
mod postgres_queue;
mod postgres_strangers;
mod redis_limits;
mod redis_loss;
mod redis_queue;
mod redis_secrets;
mod sql_store;
mod unheard;
