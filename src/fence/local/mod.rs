//! What one process knows by itself: the queues of its writes, and what it has seen refused.

mod epochs;
mod queue;
mod stale;

pub(crate) use self::queue::Permit;
pub(super) use self::{
    epochs::{BETWEEN_LOOKS, HandedOutEpochs},
    queue::{QueueKey, Queues},
    stale::StaleTokens,
};
