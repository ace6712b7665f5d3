//! The names of keys. A prefix has no colon, and the name of a resource no NUL: so no name is part of another's.

use crate::{lease::stored_id::StoredId, token::Resource};

pub(super) struct Keys {
    prefix: Box<str>,
}

/// The places in a line, as a range of keys: `places` is what they begin with.
pub(super) struct LineKeys {
    pub(super) places: String,
    end: String,
}

impl Keys {
    pub(super) fn new(prefix: &str) -> Self {
        Self {
            prefix: prefix.into(),
        }
    }

    pub(super) fn prefix(&self) -> &str {
        &self.prefix
    }

    pub(super) fn clock(&self, partition: u8) -> String {
        format!("{}:clock:{partition}", self.prefix)
    }

    pub(super) fn lease(&self, resource: &Resource) -> String {
        self.lease_of(resource.as_str())
    }

    /// The key of a lease, or what comes before all of them.
    pub(super) fn lease_of(&self, name: &str) -> String {
        format!("{}:lease:{name}", self.prefix)
    }

    /// What comes after all leases.
    pub(super) fn end_of_leases(&self) -> String {
        format!("{}:lease;", self.prefix)
    }

    pub(super) fn line(&self, resource: &Resource) -> LineKeys {
        let line = format!("{}:line:{resource}", self.prefix);
        LineKeys {
            places: format!("{line}\0"),
            end: format!("{line}\u{1}"),
        }
    }
}

impl LineKeys {
    pub(super) fn range(&self) -> (&str, &str) {
        (&self.places, &self.end)
    }

    /// The place of a lease id.
    pub(super) fn place(&self, id: &StoredId) -> String {
        format!("{}{}", self.places, id.as_str())
    }
}
