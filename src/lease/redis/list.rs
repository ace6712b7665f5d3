//! Listing of leases in the order of their names, with SCAN over the lease keys. In a cluster, the
//! masters are scanned one after the other.
//!
//! For each page, the store scans all keys, and adds their resources to [`Names`]. SCAN returns
//! every key that exists during the whole scan. The cursor of a page is not a SCAN cursor, because
//! a page may end in the middle of the result of one SCAN call, and a repeated call may return more
//! keys or fewer.

use std::collections::BTreeMap;

use futures_util::future::try_join_all;

use super::{connection::Connection, scripts::Scripts, server::Runs};
use crate::{
    epochs::partition_of,
    lease::{
        LeaseError, Page,
        backend::{Counters, Names},
    },
    token::Resource,
};

/// Approximate number of keys that one SCAN call visits.
const SCAN_SIZE: usize = 1_000;

impl Scripts {
    /// Lists held leases; see [`LeaseAdmin::list`](crate::lease::LeaseAdmin::list).
    pub(super) async fn list(
        &self,
        limit: usize,
        cursor: Option<&str>,
        counters: Counters<'_>,
    ) -> Result<Page, LeaseError> {
        let mut names = Names::after(cursor, limit)?;
        self.check_once().await?;
        let begin = self.lease_key_prefix();
        let (mut known, mut shard, mut scan) = (None, 0, 0);
        loop {
            let (shards, next, keys) = self.scan(&begin, shard, scan).await?;
            // The SCAN cursor belongs to one server. If the set of servers has changed, `shard` may
            // be the index of another server, or out of range.
            if *known.get_or_insert_with(|| shards.clone()) != shards {
                return Err(LeaseError::unavailable(ShardsChanged));
            }
            let resources = keys
                .into_iter()
                .filter_map(|key| resource_of_key(&begin, key));
            resources.for_each(|resource| names.add(&resource));
            scan = next;
            shard += usize::from(scan == 0);
            if shard >= shards.len() {
                break;
            }
        }
        let (resources, cursor) = names.page();
        // In a cluster, a script may only use keys of one slot, and each partition is in one slot.
        let mut groups: BTreeMap<u8, Vec<_>> = BTreeMap::new();
        for resource in &resources {
            let partition = match self.server().source.is_cluster() {
                true => partition_of(resource),
                false => 0,
            };
            let group = groups.entry(partition).or_default();
            group.push((resource, counters.seen(resource)));
        }
        let answers = groups.values().map(|group| self.inspect_all(group));
        let answers = try_join_all(answers).await?;
        let found = groups.values().flatten().zip(answers.into_iter().flatten());
        // A lease may have ended since the scan, or may be in its lock delay.
        let held = found.filter_map(|((resource, _), held)| Some(((*resource).clone(), held?)));
        let mut leases: Vec<_> = held.collect();
        leases.sort_unstable_by(|(one, _), (other, _)| one.cmp(other));
        Ok(Page { leases, cursor })
    }

    /// Returns the first slot of each shard, the next SCAN cursor of this shard, and some of its
    /// lease keys.
    async fn scan(
        &self,
        begin: &str,
        shard: usize,
        scan: u64,
    ) -> Result<(Vec<u16>, u64, Vec<Vec<u8>>), LeaseError> {
        let mut command = redis::cmd("SCAN");
        let command = &*command
            .arg(scan)
            .arg("MATCH")
            .arg(format!("{begin}*}}:lease:*"))
            .arg("COUNT")
            .arg(SCAN_SIZE);
        let scan = |mut connection: Connection| async move {
            let shards = connection.shards().await?;
            let (next, keys) = match shards.get(shard) {
                Some(slot) => connection.ask_shard(*slot, command).await?,
                // The caller reports the change.
                None => (0, vec![]),
            };
            Ok((shards, next, keys))
        };
        let scanned = self.server().run(Runs::UpToTwice, scan).await;
        let (scanned, _) = scanned.map_err(|error| self.server().unavailable(error))?;
        Ok(scanned)
    }
}

/// Error for a listing during which a server of the cluster was added or removed.
#[derive(Debug, thiserror::Error)]
#[error("the servers of the Redis Cluster changed during the listing: list again")]
struct ShardsChanged;

/// Returns the resource of a lease key.
pub(super) fn resource_of_key(begin: &str, key: Vec<u8>) -> Option<Resource> {
    let key = String::from_utf8(key).ok()?;
    let (partition, name) = key.strip_prefix(begin)?.split_once("}:lease:")?;
    // A name can be any string, so the key of a queue may look like that of a lease.
    let resource = Resource::new(name).ok()?;
    (partition_of(&resource).to_string() == partition).then_some(resource)
}
