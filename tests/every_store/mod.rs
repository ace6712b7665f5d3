//! What every lease store keeps: its grants, its queue, and what an issuer over it answers. Each binary that has these
//! tests says over which stores, by `on_every_store!` and `on_every_store_with_a_line!`.

mod breaks;
mod calls;
mod conformance;
mod grants;
mod line;
mod lock_delay;
mod operators;
mod owner;
mod refusals;
mod waiting;
