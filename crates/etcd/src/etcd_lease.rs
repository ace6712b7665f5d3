//! Calls for etcd leases, to which the keys of leases and positions are attached.

use std::{sync::Arc, time::Duration};

use rand::{RngExt, rand_core::UnwrapErr, rngs::SysRng};
use serde_json::json;

use crate::{
    error::EtcdError,
    etcd::Etcd,
    gateway::To,
    messages::{KeyValue, LeaseAnswer, Streamed},
    stored::FoundLease,
};

/// Returns a random, positive id for an etcd lease. Two processes practically never draw the same
/// id, even after a fork, because it comes from the operating system.
pub(crate) fn random_id() -> i64 {
    UnwrapErr(SysRng).random_range(1..=i64::MAX)
}

impl Etcd {
    /// Creates an etcd lease with this id. Returns its TTL in seconds, which is longer than
    /// requested if etcd has a higher minimum.
    pub(crate) async fn make_lease(&self, id: i64, seconds: u64) -> Result<u64, EtcdError> {
        let body = json!({ "ID": id.to_string(), "TTL": seconds.to_string() });
        let made = self
            .gateway
            .call::<LeaseAnswer>(To::Any, "/v3/lease/grant", &body);
        match made.await {
            Ok(made) => Ok(made.ttl.unsigned_abs().max(seconds)),
            // The id is random, so an earlier attempt of this call has created the etcd lease, and
            // its response was lost.
            Err(error) if error.is_lease_there() => Ok(seconds),
            Err(error) => Err(error),
        }
    }

    /// Revokes an etcd lease, which deletes its key.
    pub(crate) async fn revoke(&self, id: i64) -> Result<(), EtcdError> {
        let body = json!({ "ID": id.to_string() });
        let revoked = self
            .gateway
            .call(To::Any, "/v3/lease/revoke", &body)
            .await?;
        // The response has only a header.
        self.checked(revoked).map(drop)
    }

    /// Revokes an etcd lease that may have ended.
    pub(crate) async fn revoke_if_there(&self, id: i64) -> Result<(), EtcdError> {
        match self.revoke(id).await {
            Err(error) if error.is_not_found() => Ok(()),
            revoked => revoked,
        }
    }

    /// Revokes an etcd lease in a background task. If that fails, the etcd lease expires.
    pub(crate) fn revoke_later(self: &Arc<Self>, id: i64) {
        let etcd = Arc::clone(self);
        tokio::spawn(async move { etcd.revoke(id).await });
    }

    /// Renews an etcd lease. Returns its remaining time in seconds, or 0 if it has ended.
    pub(crate) async fn keep_alive(&self, id: i64) -> Result<u64, EtcdError> {
        let body = json!({ "ID": id.to_string() });
        let kept: Streamed<LeaseAnswer> = self
            .gateway
            .call(To::Any, "/v3/lease/keepalive", &body)
            .await?;
        Ok(u64::try_from(kept.result.ttl).unwrap_or(0))
    }

    /// Returns the remaining time of an etcd lease in seconds, or `None` if it has ended.
    pub(crate) async fn left(&self, id: i64) -> Result<Option<u64>, EtcdError> {
        let body = json!({ "ID": id.to_string() });
        let left: LeaseAnswer = self
            .gateway
            .call(To::Any, "/v3/lease/timetolive", &body)
            .await?;
        Ok(u64::try_from(left.ttl).ok())
    }

    /// Returns how long a key blocks its resource. This is at least one second, because etcd counts
    /// whole seconds.
    pub(crate) async fn blocked_for(&self, key: &KeyValue) -> Result<Duration, EtcdError> {
        let left = self.left(key.lease).await?.unwrap_or(0);
        Ok(Duration::from_secs(left.max(1)))
    }

    /// Returns whether a lease is held, and not in its lock delay. A lease without a lock delay is
    /// held while its key exists.
    pub(crate) async fn is_held(&self, lease: &FoundLease) -> Result<bool, EtcdError> {
        if lease.stored.delay == 0 {
            return Ok(true);
        }
        let left = self.left(lease.etcd_lease).await?;
        Ok(left.is_some_and(|left| left >= lease.stored.delay))
    }
}

/// Returns a duration in whole seconds, rounded up, because etcd does not count fractions.
pub(crate) fn seconds(time: Duration) -> u64 {
    time.as_secs() + u64::from(time.subsec_nanos() > 0)
}
