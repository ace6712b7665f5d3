//! What one process knows by itself: the queues of its writes, what it has seen refused, and what was handed out.

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
