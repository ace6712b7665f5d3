//! Granting: take the key on all nodes, which seals a token at once if it can, and otherwise choose
//! a token and seal it on the nodes that have answered.

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
    attempt::Attempt,
    grants::Grant,
    nodes::{Answers, Nodes},
    scripts::{Choice, Subject},
};

/// How far a proposal is above what this process has seen. With one above, a node that is once
/// ahead would stay ahead while issuers alternate, and no lease would have one token on all nodes.
const PROPOSAL_LEAD: i64 = 16;

/// What is left of a lease, on the safe side: one percent and 2 ms are for clocks of nodes that run
/// at different speeds. (The drift of Redlock.)
pub(crate) fn left_of(ttl: Duration, since: Instant) -> Option<Duration> {
    let drift = ttl / 100 + Duration::from_millis(2);
    let left = ttl.checked_sub(drift)?.checked_sub(since.elapsed())?;
    Some(left).filter(|left| !left.is_zero())
}

/// What a token is chosen for.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Wish {
    /// A grant, with the number that was proposed.
    Grant(Option<(i64, i64)>),
    /// Another token for a lease that is held, with the lowest that will do.
    Another(Option<Token>),
}

/// What the answers of the first trip lead to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// A majority has this token.
    Granted { token: Token, counted: (i64, i64) },
    /// The second trip seals this one.
    Seals(Choice),
    /// An epoch above this one begins first.
    NeedsEpoch(i64),
    /// There is no token above this one.
    Exhausted,
}

/// Chooses a token by the answers of a majority.
pub(crate) fn choose(nodes: &Nodes, answers: &Answers, seen: (i64, i64), wish: Wish) -> Next {
    let taken = answers.taken();
    let is_grant = matches!(wish, Wish::Grant(_));
    let sealed = answers.majority(|answer| match answer {
        Answer::Taken(taken) if taken.is_sealed && is_grant => taken.token,
        _ => None,
    });
    if let Some(token) = sealed
        && let counted = (token.get() / Epoch::SIZE, token.get() % Epoch::SIZE)
        && counted > seen
    {
        return Next::Granted { token, counted };
    }
    let counters = || taken.iter().map(|(_, taken)| taken.counter);
    let highest = counters().map(|counter| counter.counted()).max();
    let highest = highest.unwrap_or_default();
    let needs_epoch = Next::NeedsEpoch(highest.0.max(seen.0));
    if !counters().all(|counter| counter.usable) || highest < seen {
        return needs_epoch;
    }
    let stored = answers.majority(|answer| match answer {
        Answer::Taken(taken) if is_grant => taken.token,
        _ => None,
    });
    if let Some(token) = stored
        && let Some(counted) = nodes.counted(counters())
        && token.get() / Epoch::SIZE >= highest.0
    {
        // A repetition of a request that was granted, in an epoch that is not over.
        return Next::Granted { token, counted };
    }
    let (proposal, at_least) = match wish {
        Wish::Grant(proposal) => (proposal, None),
        Wish::Another(at_least) => (None, at_least),
    };
    let (epoch, n) = highest.max(proposal.unwrap_or_default());
    let Some(count) = Epoch::new(epoch).ok().and_then(|epoch| epoch.token(n + 1)) else {
        return needs_epoch;
    };
    // If the resource has seen a token from elsewhere, the counter does not follow: this concerns
    // the lease alone.
    let token = match taken.iter().filter_map(|(_, taken)| taken.token).max() {
        None => count,
        Some(stored) => match Token::new(stored.get() + 1) {
            Ok(above) => count.max(above),
            Err(_) => return Next::Exhausted,
        },
    };
    Next::Seals(Choice {
        token: at_least.map_or(token, |least| least.max(token)),
        epoch,
        n: n + 1,
    })
}

/// The number that an attempt proposes, in the epoch in which the nodes were seen to count.
fn proposal(seen: Seen<'_>) -> Option<(i64, i64)> {
    let n = seen.n + PROPOSAL_LEAD;
    (seen.epoch > 0 && n < Epoch::SIZE).then_some((seen.epoch, n))
}

impl QuorumBackend {
    /// Makes one attempt at a grant. If it fails, undoes it, so that other requests find no keys in
    /// their way.
    pub(crate) async fn acquire(
        &self,
        resource: &Resource,
        ask: &Ask,
        seen: Seen<'_>,
    ) -> Result<Reply, LeaseError> {
        let subject = Subject::new(resource, &ask.lease, seen);
        let attempt = self.attempts.next(ask.ticket);
        let mut sets_keys = true;
        let outcome = self.attempt(&subject, ask, attempt, seen, &mut sets_keys);
        let outcome = outcome.await;
        if sets_keys && !matches!(outcome, Ok(Reply::Granted(_))) {
            // What is not reached ends by its time.
            let _ = self.undo(&subject, ask.ticket).await;
        }
        outcome
    }

    async fn attempt(
        &self,
        subject: &Subject<'_>,
        ask: &Ask,
        attempt: Attempt,
        seen: Seen<'_>,
        sets_keys: &mut bool,
    ) -> Result<Reply, LeaseError> {
        let (nodes, began, proposal) = (&self.nodes, Instant::now(), proposal(seen));
        let take = |_| Some(nodes.scripts().take(subject, ask, attempt, proposal));
        let answers = nodes.ask(subject.source(), take).await?;
        let taken = answers.taken();
        nodes.check_twins(&taken)?;
        if taken.len() < nodes.majority() {
            *sets_keys = !answers.are_all(|answer| matches!(answer, Answer::Held { .. }));
            return self.refusal(answers);
        }
        let seen = (seen.epoch, seen.n);
        let (token, counted) = match choose(nodes, &answers, seen, Wish::Grant(proposal)) {
            Next::Granted { token, counted } => (token, counted),
            Next::NeedsEpoch(epoch) => return Ok(needs_epoch(epoch, &taken)),
            Next::Exhausted => return Ok(Reply::Exhausted(Token::MAX.get())),
            Next::Seals(choice) => {
                if let Some(refused) = self.seal(subject, attempt, &taken, choice, None).await? {
                    return Ok(refused);
                }
                (choice.token, (choice.epoch, choice.n))
            }
        };
        let ttl = left_of(ask.ttl, began).ok_or_else(|| LeaseError::unavailable(TooLate))?;
        let grant = Grant { token, attempt };
        self.grants.note(subject.resource, &subject.lease, grant);
        granted(token, ttl, counted)
    }

    /// Seals a token on the nodes whose keys were taken. Returns the reply if no majority has
    /// sealed it.
    pub(crate) async fn seal(
        &self,
        subject: &Subject<'_>,
        attempt: Attempt,
        taken: &[(usize, Taken)],
        choice: Choice,
        replaced: Option<Token>,
    ) -> Result<Option<Reply>, LeaseError> {
        let nodes = &self.nodes;
        let seal = |n: usize| {
            let (_, taken) = taken.iter().find(|(node, _)| *node == n)?;
            let (scripts, stamp) = (nodes.scripts(), &taken.stamp);
            Some(scripts.seal(subject, attempt, stamp, choice, replaced))
        };
        let answers = nodes.ask(subject.source(), seal).await?;
        if answers.count(|answer| matches!(answer, Answer::Sealed)) >= nodes.majority() {
            return Ok(None);
        }
        match answers.are_enough() {
            // A newer attempt has taken the key, or nodes have lost it.
            true => Ok(Some(Reply::Again)),
            false => Err(answers.no_majority()),
        }
    }

    /// Why no majority was taken.
    pub(crate) fn refusal(&self, answers: Answers) -> Result<Reply, LeaseError> {
        let older = answers.given.iter().filter_map(|(_, answer)| match answer {
            Answer::Older { number } => Some(*number),
            _ => None,
        });
        if let Some(number) = older.max() {
            self.attempts.saw(number);
            return Ok(Reply::Again);
        }
        if answers.prevents(|answer| matches!(answer, Answer::Lost)) {
            return Ok(Reply::Lost);
        }
        let held = |answer: &Answer| match answer {
            Answer::Held { left, lease } => Some((*left, lease.clone())),
            _ => None,
        };
        let is_held = answers.majority(|answer| held(answer).map(|(_, lease)| lease));
        if is_held.is_some() {
            // When the nodes that are held make room for a majority.
            let lefts = answers.given.iter();
            let lefts = lefts.map(|(_, answer)| held(answer).map_or(Duration::ZERO, |held| held.0));
            let mut lefts: Vec<Duration> = lefts.collect();
            lefts.sort_unstable();
            let left = lefts.get(self.nodes.majority() - 1).or(lefts.last());
            return Ok(Reply::Held {
                left: left.copied().unwrap_or_default(),
            });
        }
        // Several requests share the nodes.
        match answers.are_enough() && answers.count(|answer| held(answer).is_some()) > 0 {
            true => Ok(Reply::Again),
            false => Err(answers.no_majority()),
        }
    }

    /// Begins an epoch on the counters that were answered.
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
            let scripts = self.nodes.scripts();
            Some(scripts.begin(subject, (history, incarnation), epoch))
        };
        let answers = self.nodes.ask(subject.source(), begin).await?;
        let begun = answers.count(|answer| matches!(answer, Answer::Begun));
        Ok(begun >= self.nodes.majority())
    }
}

/// The reply to a step that needs an epoch, on the counters of these nodes: node, history and
/// incarnation.
pub(crate) fn needs_epoch(epoch: i64, taken: &[(usize, Taken)]) -> Reply {
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

pub(crate) fn granted(
    token: Token,
    ttl: Duration,
    (epoch, n): (i64, i64),
) -> Result<Reply, LeaseError> {
    let epoch = Epoch::new(epoch).map_err(LeaseError::unavailable)?;
    Ok(Reply::Granted(Granted::new(token, ttl).counted(epoch, n)))
}

/// No lease was left to be granted.
#[derive(Debug, thiserror::Error)]
#[error("the lease expired before a majority of the nodes had it")]
struct TooLate;

#[cfg(test)]
mod tests {
    use redis::Client;

    use super::super::answer::{Counter, Stamp};
    use super::*;

    fn backend() -> QuorumBackend {
        let clients = ["redis://a", "redis://b", "redis://c"].map(|url| Client::open(url).unwrap());
        let nodes = Nodes::new(clients.into(), Duration::from_secs(1), "tower-fence");
        QuorumBackend::new(nodes)
    }

    /// A node that has counted to this number of epoch 2, with this token.
    fn taken(n: i64, token: Option<i64>, is_sealed: bool) -> Answer {
        let text = || "0".to_owned();
        Answer::Taken(Taken {
            stamp: Stamp {
                history: text(),
                incarnation: text(),
                serial: text(),
            },
            incarnation: text(),
            counter: Counter {
                usable: n > 0,
                epoch: 2,
                n,
            },
            token: token.map(|n| Token::new(2 * Epoch::SIZE + n).unwrap()),
            is_sealed,
        })
    }

    fn chosen(answers: &[Answer], seen: (i64, i64), proposal: Option<(i64, i64)>) -> Next {
        let answers = Answers::of(3, answers.to_vec());
        choose(&backend().nodes, &answers, seen, Wish::Grant(proposal))
    }

    fn token(n: i64) -> Token {
        Token::new(2 * Epoch::SIZE + n).unwrap()
    }

    #[test]
    fn majority_that_sealed_one_token_grants_it() {
        let sealed = |n| taken(n, Some(n), true);
        let granted = |n| Next::Granted {
            token: token(n),
            counted: (2, n),
        };
        let seals = |n| {
            Next::Seals(Choice {
                token: token(n),
                epoch: 2,
                n,
            })
        };
        assert_eq!(chosen(&[sealed(5), sealed(5)], (0, 0), None), granted(5));
        let lagging = [sealed(5), sealed(4), sealed(5)];
        assert_eq!(chosen(&lagging, (0, 0), None), granted(5));
        // A blank counter is not asked.
        let blank = [sealed(5), taken(0, None, false), sealed(5)];
        assert_eq!(chosen(&blank, (0, 0), None), granted(5));
        // Different tokens are not added up.
        assert_eq!(chosen(&[sealed(5), sealed(4)], (0, 0), None), seals(6));
        let one = [sealed(5), taken(5, None, false)];
        assert_eq!(chosen(&one, (0, 0), Some((2, 9))), seals(10));
    }

    #[test]
    fn token_that_a_majority_has_is_answered_again() {
        let again = [
            taken(7, Some(5), false),
            taken(9, Some(5), false),
            taken(8, None, false),
        ];
        let granted = Next::Granted {
            token: token(5),
            counted: (2, 8),
        };
        assert_eq!(chosen(&again, (0, 0), None), granted);
        // That of an earlier epoch is not.
        let over = [9, 9].map(|n| taken(n, Some(5 - Epoch::SIZE), false));
        assert!(matches!(chosen(&over, (0, 0), None), Next::Seals(choice) if choice.n == 10));
        let other = [taken(7, Some(5), false), taken(9, Some(6), false)];
        assert!(matches!(chosen(&other, (0, 0), None), Next::Seals(choice) if choice.n == 10));
    }

    #[test]
    fn epoch_begins_if_a_counter_is_blank_or_behind() {
        let blank = [taken(5, None, false), taken(0, None, false)];
        assert_eq!(chosen(&blank, (0, 0), None), Next::NeedsEpoch(2));
        let behind = [taken(5, Some(5), true), taken(5, Some(5), true)];
        assert_eq!(chosen(&behind, (3, 1), None), Next::NeedsEpoch(3));
        let last = Epoch::SIZE - 1;
        let used_up = [taken(last, None, false), taken(5, None, false)];
        assert_eq!(chosen(&used_up, (0, 0), None), Next::NeedsEpoch(2));
    }

    #[test]
    fn other_token_is_above_the_stored_one_and_the_lowest_that_will_do() {
        let answers = Answers::of(
            3,
            vec![taken(5, Some(20), false), taken(9, Some(20), false)],
        );
        let another = |least: Option<i64>| {
            let wish = Wish::Another(least.map(token));
            choose(&backend().nodes, &answers, (0, 0), wish)
        };
        for (least, expected) in [(None, 21), (Some(7), 21), (Some(40), 40)] {
            let choice = Choice {
                token: token(expected),
                epoch: 2,
                n: 10,
            };
            assert_eq!(another(least), Next::Seals(choice));
        }
    }

    #[test]
    fn refusal_reports_a_holder_with_a_majority() {
        let held = |seconds, lease: &str| Answer::Held {
            left: Duration::from_secs(seconds),
            lease: lease.into(),
        };
        let refused = |given: Vec<Answer>| match backend().refusal(Answers::of(3, given)) {
            Ok(Reply::Held { left }) => Some(left.as_secs()),
            Ok(Reply::Again) => Some(0),
            Ok(other) => panic!("{other:?}"),
            Err(_) => None,
        };
        // Two nodes are free when the second of them is.
        let one = vec![held(5, "one"), held(1, "one"), held(3, "one")];
        assert_eq!(refused(one), Some(3));
        let two = vec![held(5, "one"), held(3, "another"), held(1, "one")];
        assert_eq!(refused(two), Some(3));
        assert_eq!(refused(vec![held(5, "one"), held(3, "another")]), Some(0));
        // Whether a majority has it is not known.
        assert_eq!(refused(vec![held(3, "another")]), None);
        assert_eq!(refused(vec![Answer::Lost, Answer::Refused]), None);
    }
}
