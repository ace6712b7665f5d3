//! The layer over real HTTP.

mod deferred;
mod deferred_escape;
mod deferred_settings;
mod early_refusals;
mod false_success;
mod fenced_read;
mod granted;
mod handlers;
mod idempotency;
mod idempotency_records;
mod idempotency_scope;
mod keyed;
mod known_epochs;
mod misconfigured;
mod mounting;
mod on_begin;
mod path_names;
mod protected;
mod requests;
mod several;
mod signed;
mod time_limit;
mod tower_stack;
mod turned_away;
mod writes;
