//! The guarantees of every lease store: its grants, its queue, and the answers of an issuer that
//! uses it. Each binary with these tests names its stores in the macros `on_every_store!` and
//! `on_every_store_with_a_queue!`.

mod calls;
mod conformance;
mod grants;
mod queue;
