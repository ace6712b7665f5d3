//! Choice of a token from the replies of the first round trip.

use tower_fence::{Token, epochs::Epoch};

use super::{answer::Answer, answers::Answers, scripts::Choice};

/// Purpose of a token.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Wish {
    /// A grant, with the epoch and the number that the attempt has proposed.
    Grant(Option<(i64, i64)>),
    /// A new token for a held lease.
    Another {
        /// The token that the new one replaces.
        replaced: Token,
        /// The lowest token that the renewal accepts.
        at_least: Option<Token>,
    },
}

impl Wish {
    /// Returns the token that the new one replaces.
    pub(crate) const fn replaced(self) -> Option<Token> {
        match self {
            Self::Grant(_) => None,
            Self::Another { replaced, .. } => Some(replaced),
        }
    }
}

/// Next action of a step after the first round trip.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// Grant this token, which a majority has.
    Granted(Choice),
    /// Seal this token in a second round trip.
    Seals(Choice),
    /// Request a new epoch above this number.
    NeedsEpoch(i64),
    /// Fail, because the lease has the highest possible token.
    Exhausted,
}

/// Chooses a token from the replies of a majority. `seen` is the highest count that this process
/// has seen before. The first rule that applies determines the result:
///
/// 1. If a majority has sealed the same token in this attempt at a grant, and its count is above
///    `seen`, that token is granted.
/// 2. If a counter has no epoch, or all counters are below `seen`, an epoch must begin.
/// 3. If a majority has the same token under the lease id of a grant, in the current epoch, that
///    token is granted, because the request is repeated.
/// 4. Otherwise, a token above all counters, the proposal and the tokens of the lease is sealed. If
///    the epoch has no number left, an epoch must begin. If the lease has the highest possible
///    token, the step fails.
pub(crate) fn choose(answers: &Answers, seen: (i64, i64), wish: Wish) -> Next {
    let taken = answers.taken();
    let is_grant = matches!(wish, Wish::Grant(_));
    let sealed = answers.agreed(|answer| match answer {
        Answer::Taken(taken) if taken.is_sealed && is_grant => taken.token,
        _ => None,
    });
    if let Some(token) = sealed
        && let counted = (token.get() / Epoch::SIZE, token.get() % Epoch::SIZE)
        && counted > seen
    {
        return Next::Granted(Choice { token, counted });
    }
    let counters = || taken.iter().map(|(_, taken)| taken.counter);
    let highest = counters().map(|counter| counter.counted()).max();
    let highest = highest.unwrap_or_default();
    let needs_epoch = Next::NeedsEpoch(highest.0.max(seen.0));
    if !counters().all(|counter| counter.usable) || highest < seen {
        return needs_epoch;
    }
    let stored = answers.agreed(|answer| match answer {
        Answer::Taken(taken) if is_grant => taken.token,
        _ => None,
    });
    if let Some(token) = stored
        && let Some(counted) = answers.counted(counters())
        && token.get() / Epoch::SIZE >= highest.0
    {
        // The request is repeated. This token was granted to it before, in the current epoch.
        return Next::Granted(Choice { token, counted });
    }
    let (proposal, at_least) = match wish {
        Wish::Grant(proposal) => (proposal, None),
        Wish::Another { at_least, .. } => (None, at_least),
    };
    let (epoch, n) = highest.max(proposal.unwrap_or_default());
    let Some(count) = Epoch::new(epoch).ok().and_then(|epoch| epoch.token(n + 1)) else {
        return needs_epoch;
    };
    // If a renewal has requested a lowest token, a lease may have a token above the counter. The
    // counter is not raised to that token, because it concerns only this lease.
    let token = match taken.iter().filter_map(|(_, taken)| taken.token).max() {
        None => count,
        Some(stored) => match Token::new(stored.get() + 1) {
            Ok(above) => count.max(above),
            Err(_) => return Next::Exhausted,
        },
    };
    Next::Seals(Choice {
        token: at_least.map_or(token, |least| least.max(token)),
        counted: (epoch, n + 1),
    })
}

#[cfg(test)]
mod tests {
    use super::super::answer::{Counter, Stamp, Taken};
    use super::*;

    /// Returns the reply of a node that has counted to `n` in epoch 2, with this token.
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
        choose(&answers, seen, Wish::Grant(proposal))
    }

    fn token(n: i64) -> Token {
        Token::new(2 * Epoch::SIZE + n).unwrap()
    }

    #[test]
    fn majority_that_sealed_one_token_grants_it() {
        let sealed = |n| taken(n, Some(n), true);
        let choice = |n| Choice {
            token: token(n),
            counted: (2, n),
        };
        let (granted, seals) = (|n| Next::Granted(choice(n)), |n| Next::Seals(choice(n)));
        assert_eq!(chosen(&[sealed(5), sealed(5)], (0, 0), None), granted(5));
        let lagging = [sealed(5), sealed(4), sealed(5)];
        assert_eq!(chosen(&lagging, (0, 0), None), granted(5));
        // If a majority has sealed the token, a blank counter has no effect.
        let blank = [sealed(5), taken(0, None, false), sealed(5)];
        assert_eq!(chosen(&blank, (0, 0), None), granted(5));
        // Nodes with different tokens are not a majority.
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
        let granted = Next::Granted(Choice {
            token: token(5),
            counted: (2, 8),
        });
        assert_eq!(chosen(&again, (0, 0), None), granted);
        // The token of an earlier epoch is not granted again.
        let over = [9, 9].map(|n| taken(n, Some(5 - Epoch::SIZE), false));
        assert!(
            matches!(chosen(&over, (0, 0), None), Next::Seals(choice) if choice.counted == (2, 10))
        );
        let other = [taken(7, Some(5), false), taken(9, Some(6), false)];
        assert!(
            matches!(chosen(&other, (0, 0), None), Next::Seals(choice) if choice.counted == (2, 10))
        );
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
    fn new_token_honours_the_stored_token_and_the_minimum() {
        let answers = Answers::of(
            3,
            vec![taken(5, Some(20), false), taken(9, Some(20), false)],
        );
        let another = |least: Option<i64>| {
            let wish = Wish::Another {
                replaced: token(20),
                at_least: least.map(token),
            };
            choose(&answers, (0, 0), wish)
        };
        for (least, expected) in [(None, 21), (Some(7), 21), (Some(40), 40)] {
            let choice = Choice {
                token: token(expected),
                counted: (2, 10),
            };
            assert_eq!(another(least), Next::Seals(choice));
        }
    }
}
