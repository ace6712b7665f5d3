//! State of one process: the queues of its writes, and the cache of stale tokens.

mod queue;
mod stale;

pub(crate) use self::queue::Permit;
pub(super) use self::{
    queue::{QueueKey, Queues},
    stale::StaleTokens,
};
