//! Inspecting one lease, and listing all, by the range of their keys.

use std::{sync::Arc, time::Duration};

use base64::{Engine, prelude::BASE64_URL_SAFE_NO_PAD};
use futures_util::{StreamExt, TryStreamExt, stream};
use serde_json::json;

use super::{
    messages::{RangeAnswer, base64},
    server::Etcd,
};
use crate::{
    lease::{Held, LeaseError, ListError, Page},
    token::Resource,
};

/// What stands before the key that was read last: what follows the prefix of leases in it, in base64. It need not be a
/// lease's.
const CURSOR: &str = "after-";
/// The most leases that are read for a page.
const MAX_PAGE: usize = 1_000;
/// How many leases of a page are looked at at once.
const AT_ONCE: usize = 16;

impl Etcd {
    /// Tells who holds a lease.
    pub(super) async fn inspect(&self, resource: &Resource) -> Result<Option<Held>, LeaseError> {
        let look = self.look(resource, None).await?;
        let Some(lease) = look.lease.as_ref().filter(|lease| look.counts(lease)) else {
            return Ok(None);
        };
        let left = self.held_for(lease).await?;
        Ok(left.map(|left| Held {
            token: lease.token,
            owner: lease.owner(),
            ttl: Duration::from_secs(left),
            waiters: look.waiting,
            granted_at: None,
        }))
    }

    /// Lists held leases, as [`Operate::list`](crate::lease::Operate::list) does.
    pub(super) async fn list(
        self: &Arc<Self>,
        limit: usize,
        cursor: Option<&str>,
    ) -> Result<Page, ListError> {
        let prefix = self.keys().lease_of("").into_bytes();
        let first = match cursor {
            None => prefix.clone(),
            Some(cursor) => {
                let last = read_cursor(cursor).ok_or(ListError::Cursor)?;
                // The key after that one.
                [&prefix, last.as_slice(), b"\0"].concat()
            }
        };
        let body = json!({
            "key": base64(first), "range_end": base64(self.keys().end_of_leases()),
            "limit": limit.clamp(1, MAX_PAGE).to_string(), "keys_only": true,
        });
        let found: RangeAnswer = self
            .gateway()
            .call("/v3/kv/range", &body)
            .await
            .map_err(LeaseError::from)?;
        let keys = found.kvs.iter();
        let keys: Vec<&[u8]> = keys
            .filter_map(|kv| kv.key.0.strip_prefix(prefix.as_slice()))
            .collect();
        let cursor = keys.last().filter(|_| found.more);
        let cursor = cursor.map(|key| write_cursor(key));
        // Another program's keys are passed over.
        let names = keys
            .into_iter()
            .filter_map(|key| Resource::new(str::from_utf8(key).ok()?).ok());
        let names: Vec<Resource> = names.collect();
        let looks = stream::iter(names).map(|resource| async move {
            // It may have ended since, or be in its lock delay.
            let held = self.inspect(&resource).await?;
            Ok::<_, LeaseError>(held.map(|held| (resource, held)))
        });
        let leases: Vec<_> = looks.buffered(AT_ONCE).try_collect().await?;
        Ok(Page {
            leases: leases.into_iter().flatten().collect(),
            cursor,
        })
    }
}

/// What follows the prefix of leases in the key that was read last.
pub(super) fn read_cursor(cursor: &str) -> Option<Vec<u8>> {
    let last = cursor.strip_prefix(CURSOR)?;
    BASE64_URL_SAFE_NO_PAD.decode(last).ok()
}

pub(super) fn write_cursor(last: &[u8]) -> String {
    format!("{CURSOR}{}", BASE64_URL_SAFE_NO_PAD.encode(last))
}
