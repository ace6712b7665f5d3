//! Pages of resource names, for stores that cannot read their leases in the order of the names.

use std::{collections::BTreeSet, fmt::Display};

use super::LeaseError;
use crate::token::Resource;

/// Prefix of a page's cursor. The last name of the page follows it.
const CURSOR: &str = "after:";

/// Page of resource names, for a [`Backend`](super::Backend) that cannot read its leases in the
/// order of the names.
///
/// For each page, the backend adds the names of all leases. The page contains the lowest names that
/// follow the cursor. The cursor of the next page contains the last name of this page. A lease that
/// is held during the whole listing is therefore on exactly one page, even if other leases end in
/// the meantime.
#[derive(Debug)]
pub struct Names<'a> {
    after: &'a str,
    limit: usize,
    /// The names of the page, and one more, which shows that another page follows.
    names: BTreeSet<String>,
}

impl<'a> Names<'a> {
    /// Creates an empty page, which takes at most `limit` names. A limit of 0 counts as 1.
    ///
    /// # Errors
    ///
    /// Returns [`LeaseError::invalid_cursor`] if `cursor` does not have the form of a cursor of
    /// this type.
    pub fn after(cursor: Option<&'a str>, limit: usize) -> Result<Self, LeaseError> {
        Ok(Self {
            after: last_of(cursor)?,
            // An empty page would end the listing, because it has no last name for a cursor.
            limit: limit.clamp(1, usize::MAX - 1),
            names: BTreeSet::new(),
        })
    }

    /// Adds a name. A repeated name has no effect.
    pub fn add(&mut self, resource: &Resource) {
        let (name, is_full) = (resource.as_str(), self.names.len() > self.limit);
        let highest = self.names.last().filter(|_| is_full);
        // Most names are on other pages, so this comparison avoids most copies.
        if name <= self.after || highest.is_some_and(|highest| name >= highest.as_str()) {
            return;
        }
        self.names.insert(name.to_owned());
        if self.names.len() > self.limit + 1 {
            self.names.pop_last();
        }
    }

    /// Adds the names of another value for the same page.
    pub fn merge(&mut self, mut other: Self) {
        self.names.append(&mut other.names);
        while self.names.len() > self.limit + 1 {
            self.names.pop_last();
        }
    }

    /// Returns the names of the page, in order, and the cursor of the next page.
    #[must_use]
    pub fn page(mut self) -> (Vec<Resource>, Option<String>) {
        let mut cursor = None;
        if self.names.len() > self.limit {
            self.names.pop_last();
            cursor = self.names.last().map(cursor_after);
        }
        let resources = self.names.into_iter();
        // Each name comes from a resource.
        let resources = resources.filter_map(|name| Resource::new(name).ok());
        (resources.collect(), cursor)
    }
}

/// Returns the last name of the page with this cursor. Without a cursor, returns an empty name.
pub(in crate::lease) fn last_of(cursor: Option<&str>) -> Result<&str, LeaseError> {
    let last = cursor.map_or(Some(""), |cursor| cursor.strip_prefix(CURSOR));
    last.ok_or_else(LeaseError::invalid_cursor)
}

/// Returns the cursor of a page with this last name.
pub(in crate::lease) fn cursor_after(last: impl Display) -> String {
    format!("{CURSOR}{last}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_name_is_on_one_page() {
        let resources = ["d", "b", "e", "a", "c"].map(|name| Resource::new(name).unwrap());
        let (mut cursor, mut pages) = (None, vec![]);
        loop {
            let names = || Names::after(cursor.as_deref(), 2).unwrap();
            let (mut first, mut second) = (names(), names());
            resources[..3].iter().for_each(|name| first.add(name));
            resources[2..].iter().for_each(|name| second.add(name));
            first.merge(second);
            let (page, next) = first.page();
            pages.push(page.iter().map(Resource::as_str).collect::<String>());
            match next {
                None => break,
                next => cursor = next,
            }
        }
        assert_eq!(pages, ["ab", "cd", "e"]);
        assert!(Names::after(Some("0-0-"), 2).is_err());
    }
}
