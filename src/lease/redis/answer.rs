//! Parsing of the scripts' replies.

use std::time::Duration;

use redis::{ErrorKind, RedisError};

use crate::{
    epochs::Epoch,
    lease::{
        LeaseError,
        backend::{BlankCounter, Granted, Reply},
    },
    time::of_ms,
    token::Token,
};

/// Parses the reply of a step. `ttl` is the TTL of a granted lease.
pub(super) fn parse(words: Vec<String>, ttl: Duration) -> Result<Reply, LeaseError> {
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    Ok(match words[..] {
        ["granted", token, counted] => granted(token, counted, ttl)?,
        ["held", left] => Reply::Held {
            left: parse_ms(left),
        },
        ["queued", left, joined] => Reply::Queued {
            left: parse_ms(left),
            joined: joined == "1",
        },
        ["displaced"] => Reply::Displaced,
        ["released"] => Reply::Ended,
        ["lost"] => Reply::Lost,
        ["exhausted", token] => Reply::Exhausted(parse_token(token)?.get()),
        ["epoch", history, incarnation, epoch] => {
            let mark = format!("{history} {incarnation}");
            Reply::NeedsEpoch(BlankCounter::new(parse_number(epoch)?, mark))
        }
        ["behind"] => Reply::Behind,
        ["source", theirs] => Reply::OtherSource(theirs.into()),
        [token] => granted(token, token, ttl)?,
        _ => return Err(unexpected()),
    })
}

fn granted(token: &str, counted: &str, ttl: Duration) -> Result<Reply, LeaseError> {
    // If the number is below the first epoch, another program has written it.
    let counted = parse_number(counted)?;
    let counted = Some(counted).filter(|counted| *counted >= Epoch::SIZE);
    let counted = counted.ok_or_else(unexpected)?;
    let epoch = Epoch::new(counted / Epoch::SIZE).map_err(|_| unexpected())?;
    let granted = Granted::new(parse_token(token)?, ttl);
    Ok(Reply::Granted(
        granted.counted(epoch, counted % Epoch::SIZE),
    ))
}

fn parse_token(digits: &str) -> Result<Token, LeaseError> {
    Token::new(parse_number(digits)?).map_err(|_| unexpected())
}

fn parse_number(digits: &str) -> Result<i64, LeaseError> {
    digits.parse().map_err(|_| unexpected())
}

/// Returns the error for keys that another program has written.
pub(super) fn unexpected() -> LeaseError {
    LeaseError::unavailable(RedisError::from((
        ErrorKind::UnexpectedReturnType,
        "unexpected reply from a script: the keys may belong to another program",
    )))
}

/// Parses the remaining time of a lease, in milliseconds. Redis returns a negative number for a key
/// that never expires or has just expired.
pub(super) fn parse_ms(ms: &str) -> Duration {
    of_ms(ms.parse().unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(words: &str) -> Result<String, LeaseError> {
        let words = words.split(' ').map(str::to_owned).collect();
        parse(words, Duration::from_secs(9)).map(|reply| format!("{reply:?}"))
    }

    #[test]
    fn each_answer_of_a_script_is_read() {
        for (words, reply) in [
            (
                "granted 2000000007 2000000009",
                "Granted(Granted { token: Token(2000000007), ttl: 9s, counted: Some((Epoch(2), 9)) })",
            ),
            (
                "2000000007",
                "Granted(Granted { token: Token(2000000007), ttl: 9s, counted: Some((Epoch(2), 7)) })",
            ),
            ("held 1500", "Held { left: 1.5s }"),
            ("queued -1 0", "Queued { left: 0ns, joined: false }"),
            ("queued 20 1", "Queued { left: 20ms, joined: true }"),
            ("displaced", "Displaced"),
            ("released", "Ended"),
            ("lost", "Lost"),
            ("exhausted 7", "Exhausted(7)"),
            (
                "epoch h i 3",
                r#"NeedsEpoch(BlankCounter { epoch: 3, mark: "h i" })"#,
            ),
            ("behind", "Behind"),
            ("source other", r#"OtherSource("other")"#),
        ] {
            assert_eq!(read(words).unwrap(), reply);
        }
        for other in [
            "",
            "7",
            "granted",
            "granted 7",
            "granted 0 1000000001",
            "granted 7 -1",
            "granted 7 999999999",
            "granted 7 1000000000000001",
            "epoch h i x",
        ] {
            assert!(read(other).is_err(), "{other}");
        }
    }
}
