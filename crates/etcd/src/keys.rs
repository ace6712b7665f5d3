//! Names of keys. A prefix contains no colon, and the name of a resource contains no NUL character.
//! Two different keys therefore never have the same name.

use tower_fence::Resource;

use crate::messages::Range;

/// Key prefix of the store, and the names that begin with it.
#[derive(Debug)]
pub(crate) struct Keys {
    pub(crate) prefix: Box<str>,
}

impl Keys {
    pub(crate) fn incarnation(&self) -> String {
        format!("{}:incarnation", self.prefix)
    }

    pub(crate) fn counter(&self, partition: u8) -> String {
        format!("{}:counter:{partition}", self.prefix)
    }

    /// Returns the range of the counters of all partitions.
    pub(crate) fn counters(&self) -> Range {
        self.range("counter")
    }

    pub(crate) fn lease(&self, resource: &Resource) -> String {
        format!("{}:lease:{resource}", self.prefix)
    }

    /// Returns the range of the keys of all leases. The name of each key is the first key of the
    /// range, followed by the name of the resource.
    pub(crate) fn leases(&self) -> Range {
        self.range("lease")
    }

    fn range(&self, kind: &str) -> Range {
        let kind = format!("{}:{kind}", self.prefix);
        (format!("{kind}:"), format!("{kind};"))
    }

    /// Returns the range of the positions in the queue of a resource.
    pub(crate) fn queue(&self, resource: &Resource) -> Range {
        let queue = format!("{}:queue:{resource}", self.prefix);
        (format!("{queue}\0"), format!("{queue}\u{1}"))
    }

    /// Returns the name of the position under a stored lease id.
    pub(crate) fn position(&self, resource: &Resource, id: &str) -> String {
        format!("{}:queue:{resource}\0{id}", self.prefix)
    }
}
