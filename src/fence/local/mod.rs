//! State of one process: the queues of its writes, the stale tokens that it has seen refused, and
//! the epochs that it knows to be issued.

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
