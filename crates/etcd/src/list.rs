//! Reading one lease, and listing all leases by the range of their keys.

use std::time::Duration;

use base64::{Engine, prelude::BASE64_URL_SAFE_NO_PAD};
use futures_util::{StreamExt, TryStreamExt, stream};
use serde_json::json;
use tower_fence::{
    Resource,
    epochs::partition_of,
    lease::{
        Held, LeaseError, Page, TooMuchChange,
        backend::{Counters, Seen},
    },
};

use crate::{
    counter::CounterView,
    etcd::{ATTEMPTS, Etcd},
    messages::{base64, count, get, get_range},
    stored::FoundLease,
    view::Reads,
};

/// Prefix of a cursor. The key that was read last follows it, without the prefix of lease keys, in
/// base64. That key need not be the key of a lease.
const CURSOR: &str = "after-";
/// Maximum number of keys that are read for a page.
const MAX_PAGE: usize = 1_000;
/// Number of leases of a page whose remaining time is read concurrently.
const CONCURRENT: usize = 16;
/// Number of queues that one call counts. etcd accepts up to 128 operations in a transaction.
const COUNTED: usize = 100;

impl Etcd {
    pub(crate) async fn inspect(
        &self,
        resource: &Resource,
        seen: &Seen<'_>,
    ) -> Result<Option<Held>, LeaseError> {
        let mut ended = None;
        for _ in 0..ATTEMPTS {
            let mut view = self.view(resource, Reads::default()).await?;
            let Some(lease) = view.lease else {
                return Ok(None);
            };
            if ended == Some(lease.etcd_lease) {
                // etcd has not deleted the key yet.
                return Ok(None);
            }
            view.counter.log = self.log_after(&view.counter.header).await?;
            let counter = view.counter.valid(seen);
            if counter.is_none_or(|counter| !counter.granted(&lease)) {
                return Ok(None);
            }
            // If the etcd lease has ended, the lease has ended too, or has moved to another etcd
            // lease.
            if let Some(left) = self.left(lease.etcd_lease).await? {
                return Ok(held(&lease, left, view.waiting));
            }
            ended = Some(lease.etcd_lease);
        }
        Err(LeaseError::unavailable(TooMuchChange))
    }

    pub(crate) async fn page(
        &self,
        limit: usize,
        cursor: Option<&str>,
        counters: Counters<'_>,
    ) -> Result<Page, LeaseError> {
        let (prefix, end) = self.keys.leases();
        let first = match cursor {
            None => prefix.clone().into_bytes(),
            Some(cursor) => {
                let last = read_cursor(cursor).ok_or_else(LeaseError::invalid_cursor)?;
                // The next page begins at the smallest key after the last one.
                [prefix.as_bytes(), last.as_slice(), b"\0"].concat()
            }
        };
        let page = json!({ "request_range": {
            "key": base64(first), "range_end": base64(end),
            "limit": limit.clamp(1, MAX_PAGE).to_string(),
        } });
        let reads = [
            page,
            get(&self.keys.incarnation()),
            get_range(&self.keys.counters()),
        ];
        let answer = self.read(&reads).await?;
        let header = answer.header;
        let log = self.log_after(&header).await?;
        let mut reads = answer.reads();
        let mut read = || reads.next().unwrap_or_default();
        let (found, incarnation, counters_found) =
            (read(), read().kvs.into_iter().next(), read().kvs);
        let name = |key: &[u8]| key.strip_prefix(prefix.as_bytes()).map(<[u8]>::to_vec);
        let last = found.kvs.last().and_then(|kv| name(&kv.key.0));
        let mut counter_view = CounterView {
            header,
            incarnation,
            counter: None,
            log,
        };
        // Keys of other programs are skipped. If the counter of a lease may be outdated, the lease
        // is read again, because this process may have seen a higher count since it read the page.
        let mut leases = vec![];
        for kv in &found.kvs {
            let resource = name(&kv.key.0).and_then(|name| String::from_utf8(name).ok());
            let resource = resource.and_then(|name| Resource::new(name).ok());
            let (Some(resource), Some(lease)) = (resource, FoundLease::read(kv)) else {
                continue;
            };
            let key = self.keys.counter(partition_of(&resource));
            counter_view.counter = counters_found
                .iter()
                .find(|kv| kv.key.0 == key.as_bytes())
                .cloned();
            let counter = counter_view.valid(&counters.seen(&resource));
            let counts = counter.is_some_and(|counter| counter.granted(&lease));
            leases.push((resource, lease, counts));
        }
        let waiting = self.count_waiters(&leases).await?;
        let views = leases.into_iter().zip(waiting);
        let views = stream::iter(views).map(|((resource, lease, counts), waiting)| async move {
            let left = match counts {
                true => self.left(lease.etcd_lease).await,
                false => Ok(None),
            };
            let held = match left.map_err(LeaseError::from)? {
                Some(left) => held(&lease, left, waiting),
                None => self.inspect(&resource, &counters.seen(&resource)).await?,
            };
            Ok::<_, LeaseError>(held.map(|held| (resource, held)))
        });
        let leases: Vec<_> = views.buffered(CONCURRENT).try_collect().await?;
        let cursor = last.filter(|_| found.more).map(|last| write_cursor(&last));
        Ok(Page::new(leases.into_iter().flatten().collect(), cursor))
    }

    async fn count_waiters(
        &self,
        leases: &[(Resource, FoundLease, bool)],
    ) -> Result<Vec<u64>, LeaseError> {
        let mut waiting = vec![];
        for some in leases.chunks(COUNTED) {
            let queues = some.iter().map(|(resource, ..)| self.keys.queue(resource));
            let reads: Vec<_> = queues.map(|queue| count(&queue)).collect();
            let answer = self.read(&reads).await?;
            waiting.extend(answer.reads().map(|queue| queue.count));
        }
        waiting.resize(leases.len(), 0);
        Ok(waiting)
    }
}

/// Returns a held lease whose etcd lease has `left` seconds left, or `None` during the lock delay.
fn held(lease: &FoundLease, left: u64, waiting: u64) -> Option<Held> {
    let left = left.checked_sub(lease.stored.delay)?;
    let held = Held::new(lease.token, Duration::from_secs(left));
    let mut held = held.owner(lease.owner()).waiters(waiting);
    held.granted_at = lease.granted_at();
    Some(held)
}

pub(crate) fn read_cursor(cursor: &str) -> Option<Vec<u8>> {
    let last = cursor.strip_prefix(CURSOR)?;
    BASE64_URL_SAFE_NO_PAD.decode(last).ok()
}

pub(crate) fn write_cursor(last: &[u8]) -> String {
    format!("{CURSOR}{}", BASE64_URL_SAFE_NO_PAD.encode(last))
}
