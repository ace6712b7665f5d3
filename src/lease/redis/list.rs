//! Listing, by SCAN over the lease keys.

use redis::RedisResult;
use tokio::time::timeout;

use super::{RedisLeases, scripts::Scripts};
use crate::{
    lease::{LeaseError, Leases, ListError, Page},
    token::Resource,
};

/// Where a page begins: the cursor of a SCAN, and how many of its keys were listed before. One
/// SCAN may find more than was asked for.
struct Cursor {
    scan: u64,
    skip: usize,
}

/// How many times to look on while a page is empty: other keys may lie between the leases.
const SCANS_PER_PAGE: usize = 100;

impl Cursor {
    fn parse(text: Option<&str>) -> Result<Self, ListError> {
        let Some(text) = text else {
            return Ok(Self { scan: 0, skip: 0 });
        };
        let (scan, skip) = text.split_once('-').ok_or(ListError::Cursor)?;
        Ok(Self {
            scan: scan.parse().map_err(|_| ListError::Cursor)?,
            skip: skip.parse().map_err(|_| ListError::Cursor)?,
        })
    }
}

pub(super) async fn list(
    leases: &RedisLeases,
    limit: usize,
    cursor: Option<&str>,
) -> Result<Page, ListError> {
    let mut at = Cursor::parse(cursor)?;
    let mut page = Page::default();
    for _ in 0..SCANS_PER_PAGE {
        let (next, names) = leases.scripts.scan(at.scan, limit).await?;
        for name in names.iter().skip(at.skip).take(limit) {
            // A lease may have ended since, or be in its lock delay.
            if let Ok(resource) = Resource::new(name)
                && let Some(held) = leases.inspect(&resource).await?
            {
                page.leases.push((resource, held));
            }
        }
        let done = at.skip.saturating_add(limit);
        at = if done < names.len() {
            Cursor { skip: done, ..at }
        } else {
            Cursor {
                scan: next,
                skip: 0,
            }
        };
        let last = at.scan == 0 && at.skip == 0;
        page.cursor = (!last).then(|| format!("{}-{}", at.scan, at.skip));
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
            let (_, name) = key.strip_prefix(prefix)?.split_once("}:lease:")?;
            Some(name.to_owned())
        });
        Ok((next, names.collect()))
    }
}
