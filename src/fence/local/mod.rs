//! State of one process: the queues of its writes, and the caches of stale tokens and of issued
//! epochs.

mod epochs;
mod high_mark;
mod queue;
mod stale;

use self::high_mark::HighMark;
pub(crate) use self::queue::Permit;
pub(super) use self::{
    epochs::HandedOutEpochs,
    queue::{QueueKey, Queues},
    stale::StaleTokens,
};
