//! What the scripts answer.

use std::time::Duration;

use redis::{ErrorKind, RedisError};

use crate::{
    epochs::Epoch,
    lease::{LeaseError, time::of_ms},
    token::Token,
};

/// What a script answers.
#[derive(Debug)]
pub(super) enum Answer {
    Granted(Granted),
    Held {
        left: Duration,
    },
    Queued {
        left: Duration,
    },
    /// Too many wait.
    Full,
    Watched {
        left: Duration,
        in_line: bool,
    },
    Free,
    Released,
    Lost,
    /// There is no token above this one.
    Exhausted(Token),
    NeedsEpoch(UnusableClock),
    /// The clock has counted less far than this process has seen.
    Behind,
    /// The clock belongs to another source of epochs.
    OtherSource(String),
}

/// A grant: its token, and how far the clock has counted.
#[derive(Debug)]
pub(super) struct Granted {
    pub(super) token: Token,
    pub(super) epoch: Epoch,
    pub(super) n: i64,
}

/// A clock that has no token to give until an epoch is begun on it.
#[derive(Debug)]
pub(super) struct UnusableClock {
    pub(super) history: String,
    pub(super) incarnation: String,
    pub(super) epoch: i64,
}

impl Answer {
    pub(super) fn parse(words: Vec<String>) -> Result<Self, LeaseError> {
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        Ok(match words[..] {
            ["granted", token, epoch, n] => Self::Granted(Granted {
                token: parse_token(token)?,
                epoch: Epoch::new(parse_number(epoch)?).map_err(|_| unexpected())?,
                n: parse_n(n)?,
            }),
            ["held", left] => Self::Held {
                left: parse_ms(left),
            },
            ["held", left, in_line] => Self::Watched {
                left: parse_ms(left),
                in_line: in_line == "1",
            },
            ["queued", left] => Self::Queued {
                left: parse_ms(left),
            },
            ["full"] => Self::Full,
            ["free"] => Self::Free,
            ["released"] => Self::Released,
            ["lost"] => Self::Lost,
            ["exhausted", token] => Self::Exhausted(parse_token(token)?),
            ["epoch", history, incarnation, epoch] => Self::NeedsEpoch(UnusableClock {
                history: history.into(),
                incarnation: incarnation.into(),
                epoch: parse_number(epoch)?,
            }),
            ["behind"] => Self::Behind,
            ["source", theirs] => Self::OtherSource(theirs.into()),
            _ => return Err(unexpected()),
        })
    }
}

pub(in crate::lease) fn parse_token(digits: &str) -> Result<Token, LeaseError> {
    Token::new(parse_number(digits)?).map_err(|_| unexpected())
}

pub(in crate::lease) fn parse_number(digits: &str) -> Result<i64, LeaseError> {
    digits.parse().map_err(|_| unexpected())
}

/// How far a clock has counted in its epoch. A number that is out of range is another program's.
pub(in crate::lease) fn parse_n(digits: &str) -> Result<i64, LeaseError> {
    let n = parse_number(digits)?;
    (0..Epoch::SIZE)
        .contains(&n)
        .then_some(n)
        .ok_or_else(unexpected)
}

/// The error for keys that another program has written.
pub(in crate::lease) fn unexpected() -> LeaseError {
    LeaseError::unavailable(RedisError::from((
        ErrorKind::UnexpectedReturnType,
        "the script's answer makes no sense",
    )))
}

/// What is left of a lease, in ms; Redis counts below zero where a key never ends or just ended.
pub(in crate::lease) fn parse_ms(ms: &str) -> Duration {
    of_ms(ms.parse().unwrap_or(0))
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
        for (words, answer) in [
            (
                "granted 2000000007 2 9",
                "Granted(Granted { token: Token(2000000007), epoch: Epoch(2), n: 9 })",
            ),
            ("held 1500", "Held { left: 1.5s }"),
            ("held 1500 1", "Watched { left: 1.5s, in_line: true }"),
            ("held 1500 0", "Watched { left: 1.5s, in_line: false }"),
            ("queued -1", "Queued { left: 0ns }"),
            ("full", "Full"),
            ("free", "Free"),
            ("released", "Released"),
            ("lost", "Lost"),
            ("exhausted 7", "Exhausted(Token(7))"),
            (
                "epoch h i 3",
                r#"NeedsEpoch(UnusableClock { history: "h", incarnation: "i", epoch: 3 })"#,
            ),
            ("behind", "Behind"),
            ("source other", r#"OtherSource("other")"#),
        ] {
            assert_eq!(read(words).unwrap(), answer);
        }
        for other in [
            "",
            "granted",
            "granted 0 1 1",
            "granted 7 1 -1",
            "granted 7 1 1000000000",
            "granted 7 1000000 1",
            "epoch h i x",
        ] {
            assert!(read(other).is_err(), "{other}");
        }
    }
}
