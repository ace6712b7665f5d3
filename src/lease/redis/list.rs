//! Listing, by SCAN over the lease keys; in a cluster, on one master after the other.

use std::fmt;

use super::{connection::Connection, scripts::Scripts};
use crate::{
    epochs::partition_of,
    lease::{LeaseError, ListError, Page},
    token::Resource,
};

/// Where a page begins: at a shard, the cursor of a SCAN there, and the name that was listed last of
/// what it finds. One SCAN may find more than a page holds.
#[derive(Default)]
pub(super) struct Cursor {
    shard: usize,
    scan: u64,
    after: String,
}

impl Cursor {
    pub(super) fn parse(text: &str) -> Result<Self, ListError> {
        let mut parts = text.splitn(3, '-');
        let mut next = || parts.next().ok_or(ListError::Cursor);
        Ok(Self {
            shard: next()?.parse().map_err(|_| ListError::Cursor)?,
            scan: next()?.parse().map_err(|_| ListError::Cursor)?,
            after: next()?.to_owned(),
        })
    }
}

/// As [`Cursor::parse`] reads it.
impl fmt::Display for Cursor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}-{}", self.shard, self.scan, self.after)
    }
}

/// How many times to look on while a page is empty: other keys may lie between the leases.
const SCANS_PER_PAGE: usize = 100;

impl Scripts {
    /// Lists held leases, as [`Operate::list`](crate::lease::Operate::list) does.
    pub(super) async fn list(&self, limit: usize, cursor: Option<&str>) -> Result<Page, ListError> {
        let limit = limit.max(1);
        let mut at = cursor.map_or(Ok(Cursor::default()), Cursor::parse)?;
        let mut page = Page::default();
        for _ in 0..SCANS_PER_PAGE {
            let (next, mut names) = self.scan(&at, limit).await?;
            names.sort_unstable();
            names.retain(|name| *name > at.after);
            let rest = names.split_off(names.len().min(limit));
            for name in &names {
                // A lease may have ended since, or be in its lock delay.
                if let Ok(resource) = Resource::new(name)
                    && let Some(held) = self.inspect(&resource).await?
                {
                    page.leases.push((resource, held));
                }
            }
            at = match names.pop().filter(|_| !rest.is_empty()) {
                Some(after) => Cursor { after, ..at },
                None => next.unwrap_or_default(),
            };
            let last = at.shard == 0 && at.scan == 0 && at.after.is_empty();
            page.cursor = (!last).then(|| at.to_string());
            if last || !page.leases.is_empty() {
                break;
            }
        }
        Ok(page)
    }

    /// The names of some resources whose leases have keys, and where to go on.
    async fn scan(
        &self,
        at: &Cursor,
        count: usize,
    ) -> Result<(Option<Cursor>, Vec<String>), LeaseError> {
        self.check_once().await?;
        let begin = format!("{}:{{", self.key_prefix());
        let mut command = redis::cmd("SCAN");
        let command = &*command
            .arg(at.scan)
            .arg("MATCH")
            .arg(key_pattern(&begin))
            .arg("COUNT")
            .arg(count.max(1));
        let scan = |mut connection: Connection| async move {
            let shards = connection.shards().await?;
            let (next, keys) = match shards.get(at.shard) {
                Some(slot) => connection.ask_shard(*slot, command).await?,
                // There were more of them before.
                None => (0, vec![]),
            };
            Ok((shards.len(), next, keys))
        };
        let scanned = self.server().run(scan).await;
        let (shards, scan, keys): (usize, u64, Vec<Vec<u8>>) =
            scanned.map_err(|error| self.server().unavailable(error))?;
        let next = match scan {
            0 => at.shard.saturating_add(1),
            _ => at.shard,
        };
        let next = (next < shards).then_some(Cursor {
            shard: next,
            scan,
            after: String::new(),
        });
        let names = keys
            .into_iter()
            .filter_map(|key| Some(resource_of_key(&begin, key)?.as_str().to_owned()));
        Ok((next, names.collect()))
    }
}

/// The pattern of lease keys. What they begin with, up to the partition's brace, is literal, whatever Redis's patterns
/// make of its characters.
pub(in crate::lease) fn key_pattern(begin: &str) -> String {
    let mut pattern = String::new();
    for c in begin.chars() {
        if matches!(c, '*' | '?' | '[' | ']' | '\\') {
            pattern.push('\\');
        }
        pattern.push(c);
    }
    pattern + "*}:lease:*"
}

/// The resource of a lease key.
pub(in crate::lease) fn resource_of_key(begin: &str, key: Vec<u8>) -> Option<Resource> {
    let key = String::from_utf8(key).ok()?;
    let (partition, name) = key.strip_prefix(begin)?.split_once("}:lease:")?;
    // Names may hold anything; a queue of such a name is no lease.
    let resource = Resource::new(name).ok()?;
    (partition_of(&resource).to_string() == partition).then_some(resource)
}
