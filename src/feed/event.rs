//! One event, and the number under which its kind is counted.

use std::sync::Arc;

use serde::Serialize;

use crate::token::{Resource, Token};

/// What has happened, and when.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Event {
    /// Counts up by one from event to event, over all kinds.
    pub(crate) id: u64,
    /// Milliseconds since 1970.
    pub(crate) at_ms: u64,
    #[serde(flatten)]
    pub(crate) what: What,
}

/// What has happened.
#[derive(Clone, Debug, Serialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub(crate) enum What {
    Admitted {
        resource: Resource,
        token: Token,
        read: bool,
    },
    Stale {
        resource: Resource,
        token: Token,
        max_token: i64,
        by_floor: bool,
    },
    Forged {
        resource: Option<Resource>,
        token: Token,
    },
    Refused {
        problem: &'static str,
        resource: Option<Resource>,
    },
    Waiting {
        resource: Resource,
        owner: Option<Arc<str>>,
    },
    Granted {
        resource: Resource,
        token: Token,
        owner: Option<Arc<str>>,
        waited_ms: Option<u64>,
    },
    Released {
        resource: Resource,
    },
    Lost {
        resource: Resource,
    },
    Broken {
        resource: Resource,
    },
    Outranked {
        resource: Resource,
        token: Token,
        next: Token,
    },
}

/// The kinds, in the order in which they are counted.
pub(crate) const KINDS: [&str; 10] = [
    "admitted",
    "stale",
    "forged",
    "refused",
    "waiting",
    "granted",
    "released",
    "lost",
    "broken",
    "outranked",
];

impl What {
    /// The place of its kind among [`KINDS`].
    pub(super) const fn kind(&self) -> usize {
        match self {
            Self::Admitted { .. } => 0,
            Self::Stale { .. } => 1,
            Self::Forged { .. } => 2,
            Self::Refused { .. } => 3,
            Self::Waiting { .. } => 4,
            Self::Granted { .. } => 5,
            Self::Released { .. } => 6,
            Self::Lost { .. } => 7,
            Self::Broken { .. } => 8,
            Self::Outranked { .. } => 9,
        }
    }

    /// Whether it is of the lock side. A storm of writes does not push those out.
    pub(super) const fn is_of_lease(&self) -> bool {
        self.kind() >= 4
    }
}
