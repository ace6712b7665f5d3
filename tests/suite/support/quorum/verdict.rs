//! What a schedule has come to.

use std::fmt;

use super::{Quorum, Rule, Servers};

/// A token as it is written here: `2.1` is the first one of the second epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Token {
    pub(super) epoch: i64,
    pub(super) n: i64,
}

const SIZE: i64 = 1_000_000_000;

impl Token {
    pub(super) const fn new(epoch: i64, n: i64) -> Self {
        Self { epoch, n }
    }

    pub(super) fn parse(digits: &str) -> Option<Self> {
        let token: i64 = digits.parse().ok()?;
        Some(Self::new(token / SIZE, token % SIZE))
    }

    pub(super) const fn number(self) -> i64 {
        self.epoch * SIZE + self.n
    }
}

impl fmt::Display for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.epoch, self.n)
    }
}

/// What a client was answered.
pub(super) struct Event {
    pub(super) lease: &'static str,
    pub(super) resource: &'static str,
    pub(super) token: Token,
    pub(super) kind: Kind,
    pub(super) began: usize,
    pub(super) answered: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Granted,
    Renewed,
    Lost,
}

/// How safety is lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Violation {
    /// Two leases were granted one token.
    SameTokenTwice,
    /// Who asked after a grant was answered has a lower token.
    LowerToken,
    /// A lease was renewed after another one was granted.
    OldLeaseRevived,
    /// A lease was lost that nobody has ended.
    LiveLeaseEnded,
}

/// The first violation.
fn violation(events: &[Event]) -> Option<Violation> {
    let of_later = |(n, later): (usize, &Event)| {
        let before = events[..n].iter();
        let before: Vec<_> = before
            .filter(|event| event.resource == later.resource)
            .collect();
        if later.kind == Kind::Lost {
            return Some(Violation::LiveLeaseEnded);
        }
        let twice = |earlier: &&Event| earlier.lease != later.lease && earlier.token == later.token;
        let lower =
            |earlier: &&Event| earlier.answered <= later.began && earlier.token > later.token;
        let is_other =
            |earlier: &&Event| earlier.lease != later.lease && earlier.answered <= later.began;
        if later.kind == Kind::Renewed && before.last().is_some_and(is_other) {
            return Some(Violation::OldLeaseRevived);
        }
        if before.iter().any(twice) {
            return Some(Violation::SameTokenTwice);
        }
        before.iter().any(lower).then_some(Violation::LowerToken)
    };
    events.iter().enumerate().find_map(of_later)
}

/// What the clients were answered, in short: `a 1.2, b 1.3, b renewed 1.3`.
fn story(events: &[Event]) -> String {
    let tell = |event: &Event| match event.kind {
        Kind::Granted => format!("{} {}", event.lease, event.token),
        Kind::Renewed => format!("{} renewed {}", event.lease, event.token),
        Kind::Lost => format!("{} lost {}", event.lease, event.token),
    };
    events.iter().map(tell).collect::<Vec<_>>().join(", ")
}

/// Plays a schedule with all rules: this is what the clients are answered, and nothing is violated.
pub async fn holds(servers: &mut Servers, schedule: impl AsyncFn(&mut Quorum<'_>), expected: &str) {
    let mut quorum = Quorum::new(servers, None);
    schedule(&mut quorum).await;
    quorum.finish().await;
    assert_eq!(story(&quorum.events), expected, "with all rules");
    assert_eq!(violation(&quorum.events), None);
}

/// Plays the same schedule without one rule, which is needed: this is what the clients are answered then, and it
/// violates that.
pub async fn is_caught(
    servers: &mut Servers,
    without: Rule,
    schedule: impl AsyncFn(&mut Quorum<'_>),
    expected: (&str, Violation),
) {
    let mut quorum = Quorum::new(servers, Some(without));
    schedule(&mut quorum).await;
    quorum.finish().await;
    let events = &quorum.events;
    assert_eq!(story(events), expected.0, "without {without:?}");
    assert_eq!(violation(events), Some(expected.1), "without {without:?}");
}
