//! State of one process: the queues of its writes, the stale tokens that the database has refused,
//! and the epochs that are known to be issued.

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
