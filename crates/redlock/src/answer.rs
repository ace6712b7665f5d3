//! Replies of the scripts that run on a node.

use std::time::Duration;

use redis::{ErrorKind, RedisError};
use tower_fence::{
    Token,
    epochs::Epoch,
    lease::{LeaseError, Owner},
};

use super::attempt::{Attempt, Grant};

/// Reply of a script.
#[derive(Clone, Debug)]
pub(crate) enum Answer {
    /// The attempt has taken the key.
    Taken(Taken),
    /// Another lease, or a lock delay, blocks the key for this time.
    Held {
        left: Duration,
        lease: String,
    },
    /// This attempt is older than another attempt at the same lease, which has taken the key and
    /// has this number.
    Older {
        number: u64,
    },
    /// The node does not have the lease with this token.
    Lost,
    /// The token is sealed in the key.
    Sealed,
    /// The epoch has begun on the counter.
    Begun,
    /// The script has written nothing, because the key or the counter has changed since the read.
    Refused,
    Renewed {
        token: Token,
        counter: Counter,
    },
    /// The script has removed the lease.
    Ended,
    /// The script has found no lease to remove, but it may have run twice, and the first run may
    /// have removed the lease.
    MayHaveEnded,
    /// The script has found no lease to remove.
    None,
    /// Properties of the server. A member of a cluster cannot be a node.
    Node {
        run_id: String,
        clustered: bool,
        eviction: String,
    },
    /// The lease of each resource that was read.
    Found(Vec<Option<Found>>),
    /// The server cannot be a node. [`Node::run`](super::node::Node::run) returns this reply as an
    /// error.
    Unfit(Unfit),
    /// The token counters of the node belong to issuers with these nodes.
    OtherNodes(String),
}

/// Key that an attempt has taken, and the counter of its partition.
#[derive(Clone, Debug)]
pub(crate) struct Taken {
    pub(crate) stamp: Stamp,
    /// The incarnation of the counter.
    pub(crate) incarnation: String,
    pub(crate) counter: Counter,
    /// The token of the key.
    pub(crate) token: Option<Token>,
    /// Whether this attempt has sealed the token.
    pub(crate) is_sealed: bool,
}

/// Stamp that a node writes into a key when an attempt takes the key.
#[derive(Clone, Debug)]
pub(crate) struct Stamp {
    /// The replication id of the node.
    pub(crate) history: String,
    /// The incarnation of the counter.
    pub(crate) incarnation: String,
    pub(crate) serial: String,
}

/// Count of a token counter.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Counter {
    /// Whether an epoch has begun on the counter. If not, `epoch` is the last known epoch.
    pub(crate) usable: bool,
    pub(crate) epoch: i64,
    pub(crate) n: i64,
}

impl Counter {
    /// Returns the epoch and the number, in the order in which counters are compared.
    pub(crate) const fn counted(self) -> (i64, i64) {
        (self.epoch, self.n)
    }
}

/// Lease as one node has stored it.
#[derive(Clone, Debug)]
pub(crate) struct Found {
    /// The value of the key.
    pub(crate) value: String,
    /// The stored form of the lease id.
    pub(crate) lease: String,
    /// The attempt that took the key, or `None` if another program has written the key.
    pub(crate) attempt: Option<Attempt>,
    /// The token of the lease, if the node still has the replication id that it had when the key
    /// was taken.
    pub(crate) token: Option<Token>,
    /// Whether the request that took the key has sealed its token, and the key had no token before.
    pub(crate) has_mark: bool,
    pub(crate) owner: Option<Owner>,
    /// The remaining time of the lease, or `None` during its lock delay.
    pub(crate) left: Option<Duration>,
}

/// Number of words in which `read.lua` describes a lease.
const READ: usize = 8;

impl Found {
    /// Returns the token and its attempt, if the token is valid.
    pub(crate) fn grant(&self) -> Option<Grant> {
        Some(Grant {
            token: self.token?,
            attempt: self.attempt?,
        })
    }
}

/// Reason why a server cannot be a node.
#[derive(Clone, Debug)]
pub(crate) enum Unfit {
    NoHistory,
    Replicated,
    /// The token counters of the node belong to this source of epochs.
    OtherSource(String),
}

impl Answer {
    /// Parses a reply, which consists of several texts, or of one text of several words.
    pub(crate) fn parse(texts: &[String]) -> Result<Self, LeaseError> {
        let words: Vec<&str> = match texts {
            [text] => text.split(' ').collect(),
            texts => texts.iter().map(String::as_str).collect(),
        };
        Ok(match words[..] {
            [
                answer @ ("sealed" | "taken"),
                history,
                incarnation,
                serial,
                counters,
                usable,
                epoch,
                n,
                token,
            ] => Self::Taken(Taken {
                stamp: Stamp {
                    history: history.into(),
                    incarnation: incarnation.into(),
                    serial: serial.into(),
                },
                incarnation: counters.into(),
                counter: parse_counter(usable, epoch, n)?,
                token: parse_optional_token(token)?,
                is_sealed: answer == "sealed",
            }),
            ["held", left, lease] => Self::Held {
                left: parse_ms(left),
                lease: lease.into(),
            },
            ["older", number] => Self::Older {
                number: number.parse().map_err(|_| unexpected())?,
            },
            ["lost"] => Self::Lost,
            ["sealed"] => Self::Sealed,
            ["begun"] => Self::Begun,
            ["refused"] => Self::Refused,
            ["renewed", token, usable, epoch, n] => Self::Renewed {
                token: parse_token(token)?,
                counter: parse_counter(usable, epoch, n)?,
            },
            ["none"] => Self::None,
            ["ended"] => Self::Ended,
            ["node", run_id, clustered, eviction] => Self::Node {
                run_id: run_id.into(),
                clustered: clustered == "1",
                eviction: eviction.into(),
            },
            ["found", ref answers @ ..] if answers.len().is_multiple_of(READ) => {
                let answers = answers.chunks_exact(READ).map(parse_found);
                Self::Found(answers.collect::<Result<_, _>>()?)
            }
            ["history"] => Self::Unfit(Unfit::NoHistory),
            ["replicated"] => Self::Unfit(Unfit::Replicated),
            ["source", theirs] => Self::Unfit(Unfit::OtherSource(theirs.into())),
            ["nodes", theirs] => Self::OtherNodes(theirs.into()),
            _ => return Err(unexpected()),
        })
    }

    /// Returns the lease that `read.lua` has read for a single resource.
    pub(crate) fn found(&self) -> Option<&Found> {
        match self {
            Self::Found(answers) => answers.first()?.as_ref(),
            _ => None,
        }
    }
}

/// Parses the words of `read.lua` for one resource.
fn parse_found(words: &[&str]) -> Result<Option<Found>, LeaseError> {
    let [value, lease, number, ticket, token, mark, owner, left] = *words else {
        return Err(unexpected());
    };
    if left.is_empty() {
        return Ok(None);
    }
    let attempt = number.parse().ok().zip(ticket.parse().ok());
    Ok(Some(Found {
        value: value.into(),
        lease: lease.into(),
        attempt: attempt.map(|(number, ticket)| Attempt { number, ticket }),
        token: parse_optional_token(token)?,
        has_mark: mark == "1",
        owner: Owner::new(owner).ok(),
        left: (!left.starts_with('-')).then(|| parse_ms(left)),
    }))
}

fn parse_optional_token(digits: &str) -> Result<Option<Token>, LeaseError> {
    if digits.is_empty() {
        return Ok(None);
    }
    parse_token(digits).map(Some)
}

fn parse_token(digits: &str) -> Result<Token, LeaseError> {
    Token::new(parse_number(digits)?).map_err(|_| unexpected())
}

fn parse_number(digits: &str) -> Result<i64, LeaseError> {
    digits.parse().map_err(|_| unexpected())
}

fn parse_counter(usable: &str, epoch: &str, n: &str) -> Result<Counter, LeaseError> {
    let (epoch, n) = (parse_number(epoch)?, parse_number(n)?);
    // Another program has written a number that is out of range.
    if Epoch::new(epoch).is_err() || !(0..Epoch::SIZE).contains(&n) {
        return Err(unexpected());
    }
    Ok(Counter {
        usable: usable == "1",
        epoch,
        n,
    })
}

/// Parses a remaining time in ms. Redis reports a negative number if a key never expires or has
/// just expired.
fn parse_ms(ms: &str) -> Duration {
    Duration::from_millis(ms.parse().unwrap_or(0))
}

/// Returns the error for an invalid reply, for example one for keys that another program has
/// written. The error does not quote the reply.
pub(crate) fn unexpected() -> LeaseError {
    LeaseError::unavailable(RedisError::from((
        ErrorKind::UnexpectedReturnType,
        "unexpected reply from a script: the keys may belong to another program",
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(words: &str) -> Vec<String> {
        words.split(' ').map(str::to_owned).collect()
    }

    #[test]
    fn each_answer_of_a_script_is_read() {
        let counter = "Counter { usable: true, epoch: 2, n: 9 }";
        let taken = |sealed| {
            format!(
                "Taken(Taken {{ stamp: Stamp {{ history: \"h\", incarnation: \"i\", serial: \"5\" }}, \
                 incarnation: \"j\", counter: {counter}, token: Some(Token(7)), is_sealed: {sealed} }})"
            )
        };
        for (text, answer) in [
            ("taken h i 5 j 1 2 9 7", taken(false)),
            ("sealed h i 5 j 1 2 9 7", taken(true)),
            (
                "held 1500 #id",
                r##"Held { left: 1.5s, lease: "#id" }"##.into(),
            ),
            ("older 3", "Older { number: 3 }".into()),
            ("lost", "Lost".into()),
            ("sealed", "Sealed".into()),
            ("begun", "Begun".into()),
            ("refused", "Refused".into()),
            (
                "renewed 7 1 2 9",
                format!("Renewed {{ token: Token(7), counter: {counter} }}"),
            ),
            ("none", "None".into()),
            ("ended", "Ended".into()),
            (
                "node r 1 noeviction",
                r#"Node { run_id: "r", clustered: true, eviction: "noeviction" }"#.into(),
            ),
            ("history", "Unfit(NoHistory)".into()),
            ("replicated", "Unfit(Replicated)".into()),
            ("source s", r#"Unfit(OtherSource("s"))"#.into()),
            ("nodes n", r#"OtherNodes("n")"#.into()),
        ] {
            for texts in [words(text), vec![text.to_owned()]] {
                let read = Answer::parse(&texts).unwrap();
                assert_eq!(format!("{read:?}"), answer);
            }
        }
        for other in [
            "",
            "taken h i 5 j 1 2 9",
            "renewed 7 1 1000000 9",
            "renewed 7 1 2 1000000000",
            "older x",
        ] {
            assert!(Answer::parse(&words(other)).is_err(), "{other}");
        }
    }

    #[test]
    fn read_finds_leases_and_their_attempts() {
        // The first resource has a lease in its lock delay, and the second has no lease.
        let answers = words("found v #id 12 34 7 1 w -5        ");
        let Answer::Found(found) = Answer::parse(&answers).unwrap() else {
            panic!("the answer is not that of a read");
        };
        let [Some(found), None] = &found[..] else {
            panic!("{found:?}");
        };
        assert_eq!((found.left, found.has_mark), (None, true));
        let grant = found.grant().unwrap();
        assert_eq!((grant.attempt.number, grant.attempt.ticket), (12, 34));
        assert_eq!(grant.token.get(), 7);
        // Another program has written the key.
        let answers = words("found v       5");
        let found = Answer::parse(&answers).unwrap();
        assert!(found.found().is_some_and(|found| found.grant().is_none()));
        assert!(Answer::parse(&words("found a b")).is_err());
    }
}
