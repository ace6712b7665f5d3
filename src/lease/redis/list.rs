//! Listing, by SCAN over the lease keys.

use redis::RedisResult;
use tokio::time::timeout;

use super::{RedisLeases, scripts::Scripts};
use crate::{
    lease::{LeaseError, Leases, ListError, Page, partition},
    token::Resource,
};

/// Where a page begins: the cursor of a SCAN, and the name that was listed last of what it finds.
/// One SCAN may find more than a page holds.
#[derive(Default)]
struct Cursor {
    scan: u64,
    after: String,
}

impl Cursor {
    fn parse(text: &str) -> Result<Self, ListError> {
        let (scan, after) = text.split_once('-').ok_or(ListError::Cursor)?;
        Ok(Self {
            scan: scan.parse().map_err(|_| ListError::Cursor)?,
            after: after.to_owned(),
        })
    }
}

/// How many times to look on while a page is empty: other keys may lie between the leases.
const SCANS_PER_PAGE: usize = 100;

pub(super) async fn list(
    leases: &RedisLeases,
    limit: usize,
    cursor: Option<&str>,
) -> Result<Page, ListError> {
    let limit = limit.max(1);
    let mut at = cursor.map_or(Ok(Cursor::default()), Cursor::parse)?;
    let mut page = Page::default();
    for _ in 0..SCANS_PER_PAGE {
        let (next, mut names) = leases.scripts.scan(at.scan, limit).await?;
        names.sort_unstable();
        names.retain(|name| *name > at.after);
        let rest = names.split_off(names.len().min(limit));
        for name in &names {
            // A lease may have ended since, or be in its lock delay.
            if let Ok(resource) = Resource::new(name)
                && let Some(held) = leases.inspect(&resource).await?
            {
                page.leases.push((resource, held));
            }
        }
        at = match names.pop().filter(|_| !rest.is_empty()) {
            Some(after) => Cursor { after, ..at },
            None => Cursor {
                scan: next,
                after: String::new(),
            },
        };
        let last = at.scan == 0 && at.after.is_empty();
        page.cursor = (!last).then(|| format!("{}-{}", at.scan, at.after));
        if last || !page.leases.is_empty() {
            break;
        }
    }
    Ok(page)
}

impl Scripts {
    /// The names of some resources whose leases have keys, and where to go on (0: nowhere).
    async fn scan(&self, cursor: u64, count: usize) -> Result<(u64, Vec<String>), LeaseError> {
        let prefix = self.key_prefix();
        // The prefix is literal, whatever Redis's patterns make of its characters.
        let mut pattern = String::new();
        for c in prefix.chars() {
            if matches!(c, '*' | '?' | '[' | ']' | '\\') {
                pattern.push('\\');
            }
            pattern.push(c);
        }
        let mut command = redis::cmd("SCAN");
        command
            .arg(cursor)
            .arg("MATCH")
            .arg(format!("{pattern}:{{*}}:lease:*"))
            .arg("COUNT")
            .arg(count.max(1));
        let scan = async {
            let mut connection = self.server().connection().await?;
            command.query_async(&mut connection).await
        };
        let scanned: RedisResult<(u64, Vec<Vec<u8>>)> =
            match timeout(self.server().command_wait(), scan).await {
                Ok(scanned) => scanned,
                Err(_) => Err(std::io::Error::from(std::io::ErrorKind::TimedOut).into()),
            };
        let (next, keys) = scanned.map_err(LeaseError::unavailable)?;
        let names = keys.into_iter().filter_map(|key| {
            let key = String::from_utf8(key).ok()?;
            let (digits, name) = key
                .strip_prefix(prefix)?
                .strip_prefix(":{")?
                .split_once("}:lease:")?;
            // Names may hold anything; a queue of such a name is no lease.
            let resource = Resource::new(name).ok()?;
            (partition(&resource).to_string() == digits).then(|| name.to_owned())
        });
        Ok((next, names.collect()))
    }
}
