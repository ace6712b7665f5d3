//! What a fence does, one file for each operation.

mod begin;
#[cfg(feature = "postgres")]
mod call;
mod failover;
mod fenced_read;
mod handed_out;
mod hook;
mod idempotent;
mod lock_side;
mod raise;
mod remove_idle;
mod reset;
mod retry;
mod states;
mod tables;
mod write;

pub(super) use self::hook::Hook;
pub(crate) use self::{
    fenced_read::ToRaise,
    idempotent::{KeyedRequest, Once, OnceError},
    write::{Written, typed},
};
pub use self::{
    hook::HookFuture,
    reset::ResetError,
    states::{FenceRow, FenceState},
};
