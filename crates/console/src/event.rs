//! The events of the console: their JSON form, and their conversion from `tracing` events.

use std::fmt;

use serde::Serialize;
use tower_fence::{Resource, Token};
use tracing::field::{Field, Visit};

/// An event with its time.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Event {
    /// The number of the event. It increases by one with each event of any kind.
    pub(crate) id: u64,
    /// Milliseconds since 1970.
    pub(crate) at_ms: u64,
    #[serde(flatten)]
    pub(crate) what: What,
}

/// The content of an event. See [`tower_fence::events`].
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
        used: bool,
        by_floor: bool,
    },
    Forged {
        resource: Option<Resource>,
        token: Token,
    },
    Refused {
        problem: Box<str>,
        resource: Option<Resource>,
    },
    Waiting {
        resource: Resource,
        owner: Option<Box<str>>,
    },
    Granted {
        resource: Resource,
        token: Token,
        owner: Option<Box<str>>,
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
    Superseded {
        resource: Resource,
        token: Token,
        next: Token,
    },
}

/// The kinds, in the order of their counters.
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
    "superseded",
];

impl What {
    /// Returns the event that a `tracing` event describes, or `None` if a field is missing or
    /// unknown, for example because a later version of the library has emitted it.
    pub(crate) fn read(event: &tracing::Event<'_>) -> Option<Self> {
        let mut fields = Fields::default();
        event.record(&mut fields);
        fields.what()
    }

    /// Returns the position of the event's kind in [`KINDS`].
    pub(crate) const fn kind(&self) -> usize {
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
            Self::Superseded { .. } => 9,
        }
    }

    /// Returns whether the event concerns a lease. Such events have their own ring buffer, so that
    /// a burst of writes does not evict them.
    pub(crate) const fn is_of_lease(&self) -> bool {
        self.kind() >= 4
    }
}

/// The fields of a `tracing` event.
#[derive(Default)]
struct Fields {
    event: String,
    resource: Option<Resource>,
    owner: Option<Box<str>>,
    problem: Option<Box<str>>,
    token: Option<Token>,
    next: Option<Token>,
    max_token: Option<i64>,
    waited_ms: Option<u64>,
    read: Option<bool>,
    used: Option<bool>,
    by_floor: Option<bool>,
}

impl Fields {
    fn what(self) -> Option<What> {
        let (resource, token, owner) = (self.resource, self.token, self.owner);
        Some(match self.event.as_str() {
            "admitted" => What::Admitted {
                resource: resource?,
                token: token?,
                read: self.read?,
            },
            "stale" => What::Stale {
                resource: resource?,
                token: token?,
                max_token: self.max_token?,
                used: self.used?,
                by_floor: self.by_floor?,
            },
            "forged" => What::Forged {
                resource,
                token: token?,
            },
            "refused" => What::Refused {
                problem: self.problem?,
                resource,
            },
            "waiting" => What::Waiting {
                resource: resource?,
                owner,
            },
            "granted" => What::Granted {
                resource: resource?,
                token: token?,
                owner,
                waited_ms: self.waited_ms,
            },
            "released" => What::Released {
                resource: resource?,
            },
            "lost" => What::Lost {
                resource: resource?,
            },
            "broken" => What::Broken {
                resource: resource?,
            },
            "superseded" => What::Superseded {
                resource: resource?,
                token: token?,
                next: self.next?,
            },
            _ => return None,
        })
    }
}

impl Visit for Fields {
    fn record_str(&mut self, field: &Field, value: &str) {
        match field.name() {
            "event" => self.event = value.to_owned(),
            "resource" => self.resource = Resource::new(value).ok(),
            "owner" => self.owner = Some(value.into()),
            "problem" => self.problem = Some(value.into()),
            _ => {}
        }
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        match field.name() {
            "token" => self.token = Token::new(value).ok(),
            "next" => self.next = Token::new(value).ok(),
            "max_token" => self.max_token = Some(value),
            _ => {}
        }
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        if field.name() == "waited_ms" {
            self.waited_ms = Some(value);
        }
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        match field.name() {
            "read" => self.read = Some(value),
            "used" => self.used = Some(value),
            "by_floor" => self.by_floor = Some(value),
            _ => {}
        }
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.record_str(field, &format!("{value:?}"));
    }
}
