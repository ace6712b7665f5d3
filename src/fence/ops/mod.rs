//! Operations of a fence, one file each. [`transact`] begins and retries their transactions.

mod begin;
#[cfg(feature = "postgres")]
mod call;
mod failover;
mod idempotent;
mod issued;
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

pub(super) use self::issued::IssuedEpochs;
pub(crate) use self::{idempotent::Once, write::typed};
pub use self::{
    reset::ResetError,
    states::{FenceRow, FenceState},
};
