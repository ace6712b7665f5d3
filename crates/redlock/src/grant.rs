//! Step that acquires a lease. The step takes the key on all nodes, and a node may seal a token in
//! the same script. If no majority has sealed the same token, the step chooses one, and seals it on
//! the nodes whose keys were taken.

use std::time::Duration;

use tokio::time::Instant;
use tower_fence::{
    Resource, Token,
    epochs::Epoch,
    lease::{
        LeaseError,
        backend::{Ask, BlankCounter, Granted, Reply, Seen},
    },
};

use super::{
    QuorumBackend,
    answer::{Answer, Taken, unexpected},
    answers::Answers,
    attempt::{Attempt, Attempts, Grant},
    choice::{Next, Wish, choose},
    scripts::{Choice, Subject},
};

/// Distance of a proposal from the highest count that this process has seen. With a distance of 1,
/// a node whose counter is ahead would stay ahead while issuers alternate, and the nodes would
/// never seal the same token.
const PROPOSAL_LEAD: i64 = 16;

/// Returns the remaining time of a lease, minus 1 % of its TTL and 2 ms, because the clocks of the
/// nodes run at different speeds. Redlock subtracts the same amount. Returns `None` if no time is
/// left.
pub(crate) fn left_of(ttl: Duration, since: Instant) -> Option<Duration> {
    let drift = ttl / 100 + Duration::from_millis(2);
    let left = ttl.checked_sub(drift)?.checked_sub(since.elapsed())?;
    Some(left).filter(|left| !left.is_zero())
}

/// Returns the epoch and the number that an attempt proposes, if this process has seen an epoch.
fn proposal(seen: Seen<'_>) -> Option<(i64, i64)> {
    let n = seen.n + PROPOSAL_LEAD;
    (seen.epoch > 0 && n < Epoch::SIZE).then_some((seen.epoch, n))
}

impl QuorumBackend {
    /// Makes one attempt at a grant. If the attempt fails, deletes its keys, so that they do not
    /// block other requests.
    pub(crate) async fn acquire(
        &self,
        resource: &Resource,
        ask: &Ask,
        seen: Seen<'_>,
    ) -> Result<Reply, LeaseError> {
        let (nodes, subject) = (&self.nodes, Subject::new(resource, &ask.lease, seen));
        nodes.admit(subject.source).await?;
        let (attempt, proposal) = (self.attempts.next(ask.ticket), proposal(seen));
        let began = Instant::now();
        let take = |_| Some(nodes.scripts.take(&subject, ask, attempt, proposal));
        let asked = match nodes.ask(subject.source, take).await {
            // Another lease blocks the key on each node, so no key was set.
            Ok(answers) if answers.count(is_held) == answers.asked => {
                return refusal(&self.attempts, answers);
            }
            asked => asked,
        };
        // The TTL began before the keys were taken.
        let grant = async {
            let wish = Wish::Grant(proposal);
            let choice = match self.token(&subject, attempt, asked?, wish, seen).await? {
                Ok(choice) => choice,
                Err(refused) => return Ok(refused),
            };
            let ttl = left_of(ask.ttl, began).ok_or_else(|| LeaseError::unavailable(TooLate))?;
            self.granted(&subject, attempt, choice, ttl)
        };
        let outcome = grant.await;
        if matches!(outcome, Err(LeaseError::Misconfigured(_))) {
            nodes.note_refusal();
        }
        if !matches!(outcome, Ok(Reply::Granted(_))) {
            // If a node is unreachable, the key expires there.
            let _ = self.undo(&subject, attempt).await;
        }
        outcome
    }

    /// Records the grant of a token, and returns the reply to the step.
    pub(crate) fn granted(
        &self,
        subject: &Subject<'_>,
        attempt: Attempt,
        Choice { token, counted }: Choice,
        ttl: Duration,
    ) -> Result<Reply, LeaseError> {
        let grant = Grant { token, attempt };
        self.grants.insert(subject.grant_key(), grant, ttl);
        let epoch = Epoch::new(counted.0).map_err(LeaseError::unavailable)?;
        let granted = Granted::new(token, ttl);
        Ok(Reply::Granted(granted.counted(epoch, counted.1)))
    }

    /// Chooses the token of an attempt that has taken the key on a majority of the nodes. Seals the
    /// token on these nodes, unless a majority has already sealed it. `answers` contains the
    /// replies of the nodes. If the attempt gets no token, returns the reply to the step as an
    /// inner error.
    pub(crate) async fn token(
        &self,
        subject: &Subject<'_>,
        attempt: Attempt,
        answers: Answers,
        wish: Wish,
        seen: Seen<'_>,
    ) -> Result<Result<Choice, Reply>, LeaseError> {
        let nodes = &self.nodes;
        let taken = answers.taken();
        nodes.check_twins(&taken)?;
        if taken.len() < answers.majority() {
            return refusal(&self.attempts, answers).map(Err);
        }
        let choice = match choose(&answers, (seen.epoch, seen.n), wish) {
            Next::Granted(choice) => return Ok(Ok(choice)),
            Next::NeedsEpoch(epoch) => return Ok(Err(needs_epoch(epoch, &taken))),
            Next::Exhausted => return Ok(Err(Reply::Exhausted(Token::MAX.get()))),
            Next::Seals(choice) => choice,
        };
        let seal = |n: usize| {
            let (_, taken) = taken.iter().find(|(node, _)| *node == n)?;
            let (stamp, replaced) = (&taken.stamp, wish.replaced());
            Some((nodes.scripts).seal(subject, attempt, stamp, choice, replaced))
        };
        let answers = nodes.ask(subject.source, seal).await?;
        if answers.count(|answer| matches!(answer, Answer::Sealed)) >= answers.majority() {
            return Ok(Ok(choice));
        }
        match answers.are_enough() {
            // A newer attempt has taken the key, or some nodes have lost the key.
            true => Ok(Err(Reply::Again)),
            false => Err(answers.no_majority()),
        }
    }

    /// Begins an epoch on the counters that the mark identifies. Returns whether a majority has
    /// begun the epoch.
    pub(crate) async fn begin(
        &self,
        subject: &Subject<'_>,
        counter: &BlankCounter,
        epoch: Epoch,
    ) -> Result<bool, LeaseError> {
        let marks: Option<Vec<_>> = counter.mark.split(' ').map(parse_mark).collect();
        let marks = marks.ok_or_else(unexpected)?;
        let begin = |n: usize| {
            let (_, history, incarnation) = marks.iter().find(|(node, ..)| *node == n)?;
            let counter = (*history, *incarnation);
            Some(self.nodes.scripts.begin(subject, counter, epoch))
        };
        let answers = self.nodes.ask(subject.source, begin).await?;
        let begun = answers.count(|answer| matches!(answer, Answer::Begun));
        Ok(begun >= answers.majority())
    }
}

fn is_held(answer: &Answer) -> bool {
    matches!(answer, Answer::Held { .. })
}

/// Returns the reply to a step that could not take the key on a majority of the nodes. If a node
/// has reported a newer attempt, the next number of `attempts` is above it.
fn refusal(attempts: &Attempts, answers: Answers) -> Result<Reply, LeaseError> {
    let older = answers.given.iter().filter_map(|(_, answer)| match answer {
        Answer::Older { number } => Some(*number),
        _ => None,
    });
    if let Some(number) = older.max() {
        attempts.saw(number);
        return Ok(Reply::Again);
    }
    if answers.prevents(|answer| matches!(answer, Answer::Lost)) {
        return Ok(Reply::Lost);
    }
    let holder = answers.agreed(|answer| match answer {
        Answer::Held { lease, .. } => Some(lease.clone()),
        _ => None,
    });
    if holder.is_some() {
        let times = answers.given.iter().map(|(_, answer)| match answer {
            Answer::Held { left, .. } => *left,
            _ => Duration::ZERO,
        });
        let mut times: Vec<Duration> = times.collect();
        times.sort_unstable();
        // After this time, the key is free on a majority of the nodes.
        let left = times.get(answers.majority() - 1).or(times.last());
        return Ok(Reply::Held {
            left: left.copied().unwrap_or_default(),
        });
    }
    // Concurrent requests have each taken the key on some of the nodes.
    match answers.are_enough() && answers.count(is_held) > 0 {
        true => Ok(Reply::Again),
        false => Err(answers.no_majority()),
    }
}

/// Returns the reply to a step that needs an epoch. The mark of the reply contains, for each node
/// in `taken`, its index, its replication id and the incarnation of its counter.
fn needs_epoch(epoch: i64, taken: &[(usize, Taken)]) -> Reply {
    let marks = taken.iter().map(|(node, taken)| {
        let history = &taken.stamp.history;
        format!("{node}:{history}:{}", taken.incarnation)
    });
    let marks: Vec<_> = marks.collect();
    Reply::NeedsEpoch(BlankCounter::new(epoch, marks.join(" ")))
}

fn parse_mark(mark: &str) -> Option<(usize, &str, &str)> {
    let (node, counter) = mark.split_once(':')?;
    let (history, incarnation) = counter.split_once(':')?;
    Some((node.parse().ok()?, history, incarnation))
}

/// Error for a lease that expired before it could be granted.
#[derive(Debug, thiserror::Error)]
#[error("the lease expired before a majority of the nodes had it")]
struct TooLate;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusal_reports_a_holder_with_a_majority() {
        let held = |seconds, lease: &str| Answer::Held {
            left: Duration::from_secs(seconds),
            lease: lease.into(),
        };
        let refused =
            |given: Vec<Answer>| match refusal(&Attempts::default(), Answers::of(3, given)) {
                Ok(Reply::Held { left }) => Some(left.as_secs()),
                Ok(Reply::Again) => Some(0),
                Ok(other) => panic!("{other:?}"),
                Err(_) => None,
            };
        // Two of three nodes are free after 3 s.
        let one = vec![held(5, "one"), held(1, "one"), held(3, "one")];
        assert_eq!(refused(one), Some(3));
        let two = vec![held(5, "one"), held(3, "another"), held(1, "one")];
        assert_eq!(refused(two), Some(3));
        assert_eq!(refused(vec![held(5, "one"), held(3, "another")]), Some(0));
        // One reply does not show whether a majority has the lease.
        assert_eq!(refused(vec![held(3, "another")]), None);
        assert_eq!(refused(vec![Answer::Lost, Answer::Refused]), None);
    }
}
