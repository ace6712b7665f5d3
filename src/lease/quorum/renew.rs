//! Renewing a lease, with the token it has or with another one.

use std::time::Duration;

use tokio::time::Instant;

use super::{
    answer::{Answer, Clock},
    attempt::Attempt,
    grant::{Outcome, Wish, attempt, left_of},
    pauses::Pauses,
    pending::Left,
    scripts::Take,
    shared::Quorum,
};
use crate::{
    epochs::{Epoch, partition_of},
    lease::{Lease, LeaseError, LeaseId, stored_id::StoredId, time::after},
    token::{Resource, Token},
};

impl Quorum {
    /// A token above the one that the lease has.
    pub(super) async fn another_token(
        &self,
        resource: &Resource,
        id: &LeaseId,
        ttl: Duration,
        at_least: Option<Token>,
    ) -> Result<Lease, LeaseError> {
        let stored_id = StoredId::of(id);
        let take = Take {
            id: &stored_id,
            ttl,
            lock_delay: Duration::ZERO,
            owner: "",
            only_mine: true,
        };
        let wish = Wish {
            resource,
            take,
            at_least,
        };
        let until = after(self.limit);
        let (mut next, mut pauses) = (Attempt::now(), Pauses::default());
        loop {
            // Nothing of it is taken back: the lease is held under its earlier token.
            let mut left = Left::default();
            let outcome = attempt(&self.nodes, &self.memory, wish, next, &mut left).await?;
            next = match outcome {
                Outcome::Granted { token, left } => {
                    return Ok(Lease::granted(resource, id, token, left));
                }
                Outcome::Lost | Outcome::TooLate => return Err(LeaseError::lost(resource)),
                Outcome::Exhausted => return Err(exhausted(resource)),
                Outcome::Older { number } => Attempt::above(number),
                Outcome::Held { .. } | Outcome::Split { .. } => Attempt::now(),
            };
            if Instant::now() >= until {
                return Err(LeaseError::unavailable(Contended));
            }
            pauses.pause(until).await;
        }
    }

    /// The lease for as long again, with the token it has.
    pub(super) async fn same_token(
        &self,
        resource: &Resource,
        id: &LeaseId,
        ttl: Duration,
    ) -> Result<Lease, LeaseError> {
        let partition = partition_of(resource);
        let (seen, began) = (self.memory.highest(partition), Instant::now());
        let stored_id = StoredId::of(id);
        let scripts = self.nodes.scripts();
        let renew = |_| Some(scripts.renew(self.source(), resource, &stored_id, ttl));
        let answers = self.nodes.ask(self.source(), renew).await?;
        let token = answers.majority(|answer| match answer {
            Answer::Renewed { token, .. } => Some(*token),
            _ => None,
        });
        let Some(token) = token else {
            // Where its tokens differ, a new one was not sealed on a majority, and another call may do so.
            return Err(
                match answers.prevents(|answer| matches!(answer, Answer::Lost)) {
                    true => LeaseError::lost(resource),
                    false => answers.no_majority(),
                },
            );
        };
        let clocks = answers.given.iter().filter_map(|(_, answer)| match answer {
            Answer::Renewed { clock, .. } => Some(*clock),
            _ => None,
        });
        // Clocks that were put back, or an epoch that is over: its tokens may be outranked.
        let usable = clocks.clone().filter(|clock| clock.usable);
        let is_behind = usable
            .map(Clock::counted)
            .max()
            .is_none_or(|highest| highest < seen);
        let Some(left) = left_of(ttl, began).filter(|_| !is_behind) else {
            return Err(LeaseError::lost(resource));
        };
        if let Some((epoch, n)) = self.nodes.counted(clocks) {
            let epoch = Epoch::new(epoch).map_err(LeaseError::unavailable)?;
            self.memory.record_renewal(partition, epoch, n);
        }
        Ok(Lease::granted(resource, id, token, left))
    }
}

/// There is no token above the one that the lease has.
pub(super) fn exhausted(resource: &Resource) -> LeaseError {
    LeaseError::Exhausted {
        resource: resource.clone(),
        max_token: Token::MAX.get(),
    }
}

/// Requests were in each other's way.
#[derive(Debug, thiserror::Error)]
#[error("other requests for the same lease are under way")]
pub(super) struct Contended;
