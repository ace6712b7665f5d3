//! What the scripts of a node answer.

use std::time::Duration;

use crate::{
    epochs::Epoch,
    lease::{
        LeaseError, Owner,
        redis::{parse_ms, parse_n, parse_number, parse_token, unexpected},
    },
    token::Token,
};

/// What a script of a node answers.
#[derive(Clone, Debug)]
pub(super) enum Answer {
    Taken(Taken),
    Held {
        left: Duration,
        id: String,
    },
    /// A newer attempt of the same lease was here, with this number.
    Older {
        number: u64,
    },
    Lost,
    Sealed,
    Refused,
    Renewed {
        token: Token,
        clock: Clock,
    },
    Found(Found),
    None,
    Ended,
    Node {
        run_id: String,
        clustered: bool,
        eviction: String,
    },
    /// The node cannot be used.
    Unfit(Unfit),
}

/// A key that is set, and not sealed yet.
#[derive(Clone, Debug)]
pub(super) struct Taken {
    pub(super) stamp: Stamp,
    pub(super) clock: Clock,
    /// What was stored under an earlier attempt.
    pub(super) stored: Option<Token>,
}

/// What a node gave a lease when its key was set.
#[derive(Clone, Debug)]
pub(super) struct Stamp {
    pub(super) history: String,
    pub(super) incarnation: String,
    pub(super) serial: String,
}

/// How far a clock has counted.
#[derive(Clone, Copy, Debug)]
pub(super) struct Clock {
    /// Whether it has an epoch. Otherwise this is the one that was known last.
    pub(super) usable: bool,
    pub(super) epoch: i64,
    pub(super) n: i64,
}

impl Clock {
    /// As it is compared.
    pub(super) const fn counted(self) -> (i64, i64) {
        (self.epoch, self.n)
    }
}

/// A lease as one node has it.
#[derive(Clone, Debug)]
pub(super) struct Found {
    /// What is stored.
    pub(super) value: String,
    pub(super) id: String,
    /// Where there is one that counts.
    pub(super) token: Option<Token>,
    pub(super) owner: Option<Owner>,
    /// What is left of the lease; `None` in its lock delay.
    pub(super) left: Option<Duration>,
}

/// Why a node cannot be used.
#[derive(Clone, Debug)]
pub(super) enum Unfit {
    NoHistory,
    Replicated,
    OtherSource(String),
    OtherNodes(String),
}

impl Answer {
    pub(super) fn parse(words: Vec<String>) -> Result<Self, LeaseError> {
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        Ok(match words[..] {
            [
                "taken",
                history,
                incarnation,
                serial,
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
                clock: parse_clock(usable, epoch, n)?,
                stored: parse_optional_token(token)?,
            }),
            ["held", left, id] => Self::Held {
                left: parse_ms(left),
                id: id.into(),
            },
            ["older", number] => Self::Older {
                number: number.parse().map_err(|_| unexpected())?,
            },
            ["lost"] => Self::Lost,
            ["sealed"] => Self::Sealed,
            ["refused"] => Self::Refused,
            ["renewed", token, usable, epoch, n] => Self::Renewed {
                token: parse_token(token)?,
                clock: parse_clock(usable, epoch, n)?,
            },
            ["found", value, id, token, owner, left] => Self::Found(Found {
                value: value.into(),
                id: id.into(),
                token: parse_optional_token(token)?,
                owner: Owner::new(owner)
                    .ok()
                    .filter(|owner| !owner.as_str().is_empty()),
                left: (!left.starts_with('-')).then(|| parse_ms(left)),
            }),
            ["none"] => Self::None,
            ["ended"] => Self::Ended,
            ["node", run_id, clustered, eviction] => Self::Node {
                run_id: run_id.into(),
                clustered: clustered == "1",
                eviction: eviction.into(),
            },
            ["history"] => Self::Unfit(Unfit::NoHistory),
            ["replicated"] => Self::Unfit(Unfit::Replicated),
            ["source", theirs] => Self::Unfit(Unfit::OtherSource(theirs.into())),
            ["nodes", theirs] => Self::Unfit(Unfit::OtherNodes(theirs.into())),
            _ => return Err(unexpected()),
        })
    }
}

fn parse_optional_token(digits: &str) -> Result<Option<Token>, LeaseError> {
    if digits.is_empty() {
        return Ok(None);
    }
    parse_token(digits).map(Some)
}

fn parse_clock(usable: &str, epoch: &str, n: &str) -> Result<Clock, LeaseError> {
    let (epoch, n) = (parse_number(epoch)?, parse_n(n)?);
    // A number that is out of range is another program's.
    Epoch::new(epoch).map_err(|_| unexpected())?;
    Ok(Clock {
        usable: usable == "1",
        epoch,
        n,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(words: &str) -> Result<String, LeaseError> {
        let words = words.split(' ').map(str::to_owned).collect();
        Answer::parse(words).map(|answer| format!("{answer:?}"))
    }

    #[test]
    fn each_answer_of_a_script_is_read() {
        let clock = "Clock { usable: true, epoch: 2, n: 9 }";
        for (words, answer) in [
            (
                "taken h i 5 1 2 9 7",
                format!(
                    "Taken(Taken {{ stamp: Stamp {{ history: \"h\", incarnation: \"i\", serial: \"5\" }}, \
                     clock: {clock}, stored: Some(Token(7)) }})"
                ),
            ),
            (
                "held 1500 #id",
                r##"Held { left: 1.5s, id: "#id" }"##.into(),
            ),
            ("older 3", "Older { number: 3 }".into()),
            ("lost", "Lost".into()),
            ("sealed", "Sealed".into()),
            ("refused", "Refused".into()),
            (
                "renewed 7 1 2 9",
                format!("Renewed {{ token: Token(7), clock: {clock} }}"),
            ),
            (
                "found v #id  w -5",
                "Found(Found { value: \"v\", id: \"#id\", token: None, owner: Some(Owner(\"w\")), left: None })"
                    .into(),
            ),
            (
                "found v #id 7  5000",
                "Found(Found { value: \"v\", id: \"#id\", token: Some(Token(7)), owner: None, left: Some(5s) })"
                    .into(),
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
            ("nodes n", r#"Unfit(OtherNodes("n"))"#.into()),
        ] {
            assert_eq!(read(words).unwrap(), answer);
        }
        for other in [
            "",
            "taken h i 5 1 2 9",
            "renewed 7 1 1000000 9",
            "renewed 7 1 2 1000000000",
            "older x",
        ] {
            assert!(read(other).is_err(), "{other}");
        }
    }
}
