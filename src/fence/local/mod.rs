//! What one process knows by itself: the queues of its writes, what it has seen refused, and what was handed out.

mod epochs;
mod high_mark;
mod queue;
mod stale;

pub(super) use self::{
    epochs::HandedOutEpochs,
    queue::{QueueKey, Queues},
    stale::StaleTokens,
};
pub(crate) use self::{high_mark::HighMark, queue::Permit};
