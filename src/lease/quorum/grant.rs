//! Granting: take the key on all nodes, choose a token, seal it on those that were taken.

use std::{sync::Arc, time::Duration};

use tokio::time::Instant;

use super::{
    answer::{Answer, Taken},
    attempt::Attempt,
    nodes::{Answers, Nodes},
    pending::Left,
    scripts::{Choice, Take},
};
use crate::{
    epochs::{Epoch, SourceId, partition_of},
    lease::{LeaseError, memory::Memory, redis::unexpected, single_flight::Flight},
    metrics,
    token::{Resource, Token},
};

/// How often a key is taken for one request: each time after the second means that the epoch was over.
const TAKES: usize = 6;

/// What became of one attempt.
#[derive(Debug)]
pub(super) enum Outcome {
    /// With what is left of its time.
    Granted { token: Token, left: Duration },
    /// A majority has the lease of another holder.
    Held { left: Duration },
    /// No majority could be had, and none has another holder: several ask at once.
    Split { left: Duration },
    /// A newer attempt of the same lease is under way, with this number or a higher one.
    Older { number: u64 },
    /// The lease that was to have another token is not held.
    Lost,
    /// There is no token above this one.
    Exhausted,
    /// The time of the lease was over before a majority had it.
    TooLate,
}

/// What is asked of an attempt beside the key.
#[derive(Clone, Copy)]
pub(super) struct Wish<'a> {
    pub(super) resource: &'a Resource,
    pub(super) take: Take<'a>,
    /// What the token has to be at least.
    pub(super) at_least: Option<Token>,
}

/// What is left of a lease, on the safe side: one percent and 2 ms are for clocks that do not run alike.
/// (The drift of Redlock.)
pub(super) fn left_of(ttl: Duration, since: Instant) -> Option<Duration> {
    let drift = ttl / 100 + Duration::from_millis(2);
    let left = ttl.checked_sub(drift)?.checked_sub(since.elapsed())?;
    Some(left).filter(|left| !left.is_zero())
}

/// Makes one attempt, and the next one where the epoch of its token turns out to be over. What is left on the nodes is
/// noted in `leftover`.
pub(super) async fn attempt(
    nodes: &Nodes,
    memory: &Arc<Memory>,
    wish: Wish<'_>,
    mut attempt: Attempt,
    leftover: &mut Left,
) -> Result<Outcome, LeaseError> {
    memory.learn_source().await?;
    let source = memory.source().map_or("", SourceId::as_str);
    let partition = partition_of(wish.resource);
    let mut flight = None;
    for _ in 0..TAKES {
        // What was granted before the key is taken, a majority has counted.
        let seen = memory.highest(partition);
        let began = Instant::now();
        leftover.begins(attempt);
        let take = |_| {
            Some(
                nodes
                    .scripts()
                    .take(source, wish.resource, wish.take, attempt),
            )
        };
        let answers = nodes.ask(source, take).await?;
        let taken = taken(&answers);
        nodes.check_twins(&taken)?;
        if taken.len() < nodes.majority() {
            if answers.are_all(|answer| matches!(answer, Answer::Held { .. })) {
                leftover.sets_nothing();
            }
            return refusal(answers, nodes);
        }
        let highest = taken.iter().map(|(_, taken)| taken.clock.counted()).max();
        let highest = highest.ok_or_else(unexpected)?;
        let usable = taken.iter().all(|(_, taken)| taken.clock.usable) && highest >= seen;
        let stored = answers.majority(|answer| match answer {
            Answer::Taken(taken) => taken.stored,
            _ => None,
        });
        if let Some(token) = stored.filter(|_| usable && !wish.take.only_mine) {
            // A repetition of a request that was granted.
            flight = None;
            let counted = nodes.counted(taken.iter().map(|(_, taken)| taken.clock));
            let (epoch, n) = counted.ok_or_else(unexpected)?;
            let epoch = Epoch::new(epoch).map_err(LeaseError::unavailable)?;
            if memory.record_grant(partition, epoch, n).await? {
                return Ok(in_time(token, wish, began));
            }
            continue;
        }
        let (epoch, n) = if usable && highest.1 + 1 < Epoch::SIZE {
            (highest.0, highest.1 + 1)
        } else if flight.is_none() {
            // One request of this process at a time goes on from here. To take the key again tells whether another
            // one, which was first, has begun the epoch.
            flight = Some(memory.flight(partition).await?);
            continue;
        } else {
            let epoch = match memory.next_epoch(partition, highest.0.max(seen.0)).await {
                Ok(epoch) => epoch,
                Err(error) => return Err(share(flight, error)),
            };
            metrics::count("tower_fence_epochs_begun_total");
            tracing::info!(partition, %epoch, "began an epoch");
            (epoch.get(), 1)
        };
        let Some(choice) = choose(epoch, n, &taken, wish.at_least) else {
            return Ok(Outcome::Exhausted);
        };
        leftover.seals(choice.token, taken.iter().map(|(node, _)| *node));
        let answers = seal(nodes, source, wish, attempt, &taken, choice).await?;
        if answers.count(|answer| matches!(answer, Answer::Sealed)) < nodes.majority() {
            return match answers.are_enough() {
                // A newer attempt has taken the key, or nodes have lost it.
                true => Ok(Outcome::Split {
                    left: Duration::ZERO,
                }),
                false => Err(answers.no_majority()),
            };
        }
        flight = None;
        let epoch = Epoch::new(epoch).map_err(LeaseError::unavailable)?;
        if memory.record_grant(partition, epoch, n).await? {
            return Ok(in_time(choice.token, wish, began));
        }
        // The epoch is over. Taken again, the key gets a token of another one: under another attempt, as a seal of this
        // one may still be on its way, and would put the lower token back.
        attempt = Attempt::above(attempt.number);
    }
    Err(unexpected())
}

/// A failure, which is shared with the requests that wait for this one.
fn share(flight: Option<Flight<'_>>, error: LeaseError) -> LeaseError {
    match flight {
        Some(flight) => flight.fail(error),
        None => error,
    }
}

fn taken(answers: &Answers) -> Vec<(usize, Taken)> {
    let taken = answers.given.iter().filter_map(|(n, answer)| match answer {
        Answer::Taken(taken) => Some((*n, taken.clone())),
        _ => None,
    });
    taken.collect()
}

/// The token by this count. Where the resource has seen a token from elsewhere, it has to be higher: above the one
/// that the lease has, and at least the one that is asked for. The clock does not follow then, as this concerns the
/// lease alone.
fn choose(epoch: i64, n: i64, taken: &[(usize, Taken)], at_least: Option<Token>) -> Option<Choice> {
    let mut token = Epoch::new(epoch).ok()?.token(n)?;
    if let Some(stored) = taken.iter().filter_map(|(_, taken)| taken.stored).max() {
        token = token.max(Token::new(stored.get() + 1).ok()?);
    }
    let token = at_least.map_or(token, |least| least.max(token));
    Some(Choice { token, epoch, n })
}

/// Seals the token on the nodes whose keys were taken.
async fn seal(
    nodes: &Nodes,
    source: &str,
    wish: Wish<'_>,
    attempt: Attempt,
    taken: &[(usize, Taken)],
    choice: Choice,
) -> Result<Answers, LeaseError> {
    let seal = |n: usize| {
        let (_, taken) = taken.iter().find(|(node, _)| *node == n)?;
        let (resource, id) = (wish.resource, wish.take.id);
        let scripts = nodes.scripts();
        Some(scripts.seal(resource, id, attempt, &taken.stamp, choice))
    };
    nodes.ask(source, seal).await
}

fn in_time(token: Token, wish: Wish<'_>, began: Instant) -> Outcome {
    match left_of(wish.take.ttl, began) {
        Some(left) => Outcome::Granted { token, left },
        None => Outcome::TooLate,
    }
}

/// Why no majority could be taken.
fn refusal(answers: Answers, nodes: &Nodes) -> Result<Outcome, LeaseError> {
    let older = answers.given.iter().filter_map(|(_, answer)| match answer {
        Answer::Older { number } => Some(*number),
        _ => None,
    });
    if let Some(number) = older.max() {
        return Ok(Outcome::Older { number });
    }
    if answers.prevents(|answer| matches!(answer, Answer::Lost)) {
        return Ok(Outcome::Lost);
    }
    let held = |answer: &Answer| match answer {
        Answer::Held { left, id } => Some((*left, id.clone())),
        _ => None,
    };
    // When the nodes that are held make room for a majority.
    let mut lefts: Vec<Duration> = answers
        .given
        .iter()
        .map(|(_, answer)| held(answer).map_or(Duration::ZERO, |held| held.0))
        .collect();
    lefts.sort_unstable();
    let left = lefts
        .get(nodes.majority() - 1)
        .or(lefts.last())
        .copied()
        .unwrap_or_default();
    if answers
        .majority(|answer| held(answer).map(|(_, id)| id))
        .is_some()
    {
        return Ok(Outcome::Held { left });
    }
    match answers.are_enough() && answers.count(|answer| held(answer).is_some()) > 0 {
        true => Ok(Outcome::Split { left }),
        false => Err(answers.no_majority()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn held(seconds: u64, id: &str) -> Answer {
        Answer::Held {
            left: Duration::from_secs(seconds),
            id: id.into(),
        }
    }

    fn refused(given: Vec<Answer>) -> Option<(bool, u64)> {
        let urls = ["redis://a", "redis://b", "redis://c"];
        let nodes = Nodes::new(
            &urls,
            &crate::lease::redis::Credentials::default(),
            Duration::from_secs(1),
            "tower-fence",
        )
        .unwrap();
        match refusal(Answers::of(3, given), &nodes) {
            Ok(Outcome::Held { left }) => Some((true, left.as_secs())),
            Ok(Outcome::Split { left }) => Some((false, left.as_secs())),
            Ok(other) => panic!("{other:?}"),
            Err(_) => None,
        }
    }

    #[test]
    fn what_is_in_the_way_has_a_majority_or_several_share_the_nodes() {
        let another = || held(3, "another");
        // Two nodes are free when the second of them is.
        let one_id = vec![held(5, "one"), held(1, "one"), held(3, "one")];
        assert_eq!(refused(one_id), Some((true, 3)));
        let two_ids = vec![held(5, "one"), another(), held(1, "one")];
        assert_eq!(refused(two_ids), Some((true, 3)));
        assert_eq!(refused(vec![held(5, "one"), another()]), Some((false, 5)));
        assert_eq!(refused(vec![Answer::Lost, another()]), Some((false, 3)));
        // Whether a majority has it is not known.
        assert_eq!(refused(vec![another()]), None);
        assert_eq!(refused(vec![Answer::Lost, Answer::Refused]), None);
    }
}
