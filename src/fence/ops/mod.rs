//! Operations of a fence, one file each.

mod begin;
#[cfg(feature = "postgres")]
mod call;
#[cfg(feature = "postgres")]
mod distribute;
mod failover;
mod handed_out;
mod idempotent;
mod lock_side;
mod maintain;
#[cfg(feature = "postgres")]
mod protect;
mod raise;
mod remove_idle;
mod reset;
mod setup;
mod states;
mod transact;
mod write;

pub(crate) use self::{
    idempotent::{KeyedRequest, Once, OnceError},
    write::{Written, typed},
};
pub use self::{
    reset::ResetError,
    states::{FenceRow, FenceState},
};
