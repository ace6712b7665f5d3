//! What the store asks of etcd: transactions on a resource, and etcd leases.

use std::{sync::Arc, time::Duration};

use serde_json::{Value, json};

use super::{
    clock::ClockState,
    gateway::{EtcdError, Gateway},
    keys::Keys,
    life::Log,
    look::Look,
    messages::{
        Header, KeyValue, LeaseAnswer, RangeAnswer, StatusAnswer, Streamed, TxnAnswer, base64,
        count, get,
    },
    stored::{FoundLease, FoundPlace},
};
use crate::{
    epochs::partition_of,
    lease::{LeaseError, background::Background, memory::Memory, stored_id::StoredId},
    token::Resource,
};

/// How often the length of the log is asked for before it goes without: each time means that another member has
/// answered, as behind a load balancer.
const STATUSES: usize = 4;

/// The id of an etcd lease: a positive number that nobody else draws.
pub(super) fn random_id() -> i64 {
    rand::random_range(1..=i64::MAX)
}

pub(super) struct Etcd {
    gateway: Gateway,
    memory: Arc<Memory>,
    keys: Keys,
}

impl Etcd {
    pub(super) fn new(gateway: Gateway, memory: Arc<Memory>, keys: Keys) -> Self {
        Self {
            gateway,
            memory,
            keys,
        }
    }

    pub(super) const fn gateway(&self) -> &Gateway {
        &self.gateway
    }

    pub(super) const fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    pub(super) const fn keys(&self) -> &Keys {
        &self.keys
    }

    /// Makes sure that etcd answers.
    pub(super) async fn check(&self) -> Result<(), EtcdError> {
        let body = json!({ "key": base64(self.keys.clock(0)) });
        let answer: RangeAnswer = self.gateway.call("/v3/kv/range", &body).await?;
        match answer.header.cluster_id {
            0 => Err(self.gateway.meaningless()),
            _ => Ok(()),
        }
    }

    /// Looks at a resource, and at the place in line of a lease id.
    pub(super) async fn look(
        &self,
        resource: &Resource,
        id: Option<&StoredId>,
    ) -> Result<Look, LeaseError> {
        self.look_in_life(resource, id, true).await
    }

    /// The same for what looks again before it answers: whether the clock is of this life of the cluster is found out
    /// only where it `asks_for_log`.
    pub(super) async fn look_in_life(
        &self,
        resource: &Resource,
        id: Option<&StoredId>,
        asks_for_log: bool,
    ) -> Result<Look, LeaseError> {
        let look = self.transact_in_life(resource, id, vec![], vec![], asks_for_log);
        Ok(look.await?)
    }

    /// Writes where these comparisons hold, and looks at the resource in any case. Whether it was written is to be
    /// seen by what is there: the transaction may have run twice.
    pub(super) async fn transact(
        &self,
        resource: &Resource,
        id: Option<&StoredId>,
        compare: Vec<Value>,
        writes: Vec<Value>,
    ) -> Result<Look, EtcdError> {
        self.transact_in_life(resource, id, compare, writes, true)
            .await
    }

    /// The same for what ends leases, whichever life of the cluster they are from: the clock says nothing there, and
    /// nobody is asked how long the log is.
    pub(super) async fn transact_to_end(
        &self,
        resource: &Resource,
        compare: Vec<Value>,
        writes: Vec<Value>,
    ) -> Result<Look, EtcdError> {
        self.transact_in_life(resource, None, compare, writes, false)
            .await
    }

    async fn transact_in_life(
        &self,
        resource: &Resource,
        id: Option<&StoredId>,
        compare: Vec<Value>,
        mut writes: Vec<Value>,
        asks_for_log: bool,
    ) -> Result<Look, EtcdError> {
        let partition = partition_of(resource);
        let seen = self.memory.highest(partition);
        let line = self.keys.line(resource);
        let mut reads = vec![
            get(&self.keys.clock(partition)),
            get(&self.keys.lease(resource)),
            count(line.range()),
        ];
        reads.extend(id.map(|id| get(&line.place(id))));
        writes.extend(reads.iter().cloned());
        let body = json!({ "compare": compare, "success": writes, "failure": reads });
        let answer: TxnAnswer = self.gateway.call("/v3/kv/txn", &body).await?;
        let header = answer.header;
        if header.cluster_id == 0 {
            return Err(self.gateway.meaningless());
        }
        let log = match asks_for_log {
            true => self.log_after(&header).await?,
            false => Log::default(),
        };
        let mut reads = answer.reads().into_iter();
        let mut read = || reads.next().unwrap_or_default();
        let mut key = || read().kvs.into_iter().next();
        let (clock, closed_by) = (key(), key());
        let waiting = read().count;
        let place = read().kvs.first().map(FoundPlace::read);
        let source = self.memory.source();
        Ok(Look {
            clock: ClockState::judge(clock.as_ref(), &header, log, seen, source),
            lease: closed_by.as_ref().and_then(FoundLease::read),
            closed_by,
            waiting: waiting.unsigned_abs(),
            place,
            log,
            header,
        })
    }

    /// Makes an etcd lease with this id. Returns how many seconds it lasts: at least as many as were asked for.
    pub(super) async fn make_lease(&self, id: i64, seconds: u64) -> Result<u64, EtcdError> {
        let body = json!({ "ID": id.to_string(), "TTL": seconds.to_string() });
        match self
            .gateway
            .call::<LeaseAnswer>("/v3/lease/grant", &body)
            .await
        {
            Ok(made) => Ok(made.ttl.unsigned_abs().max(seconds)),
            // The id was drawn at random, so it is this one, and the answer to the first attempt was lost.
            Err(error) if error.is_lease_there() => Ok(seconds),
            Err(error) => Err(error),
        }
    }

    /// Ends an etcd lease, and its keys. Where that fails it ends by its time.
    pub(super) async fn revoke(&self, id: i64) {
        let body = json!({ "ID": id.to_string() });
        let _ = self.gateway.call::<Value>("/v3/lease/revoke", &body).await;
    }

    /// The same in the background.
    pub(super) fn revoke_later(self: &Arc<Self>, id: i64, background: &Background) {
        let etcd = Arc::clone(self);
        background.spawn(async move { etcd.revoke(id).await });
    }

    /// Starts the time of etcd leases anew, and returns what each of them has left; 0 for one that has ended.
    pub(super) async fn keep_alive(&self, ids: &[i64]) -> Result<Vec<i64>, EtcdError> {
        let requests: Vec<_> = ids
            .iter()
            .map(|id| json!({ "ID": id.to_string() }))
            .collect();
        let kept = self.gateway.call_stream("/v3/lease/keepalive", &requests);
        let kept: Vec<Streamed<LeaseAnswer>> = kept.await?;
        Ok(kept.into_iter().map(|kept| kept.result.ttl).collect())
    }

    /// What an etcd lease has left, in whole seconds; `None` where it has ended.
    pub(super) async fn left(&self, id: i64) -> Result<Option<u64>, EtcdError> {
        let body = json!({ "ID": id.to_string() });
        let left: LeaseAnswer = self.gateway.call("/v3/lease/timetolive", &body).await?;
        Ok(u64::try_from(left.ttl).ok())
    }

    /// How long a resource stays closed by a key, at least a second: that is how exact etcd is.
    pub(super) async fn closed_for(&self, key: &KeyValue) -> Result<Duration, EtcdError> {
        let left = self.left(key.lease).await?.unwrap_or(0);
        Ok(Duration::from_secs(left.max(1)))
    }

    /// Whether a lease is held, and not in its lock delay: `None`, or for how many seconds.
    pub(super) async fn held_for(&self, lease: &FoundLease) -> Result<Option<u64>, EtcdError> {
        let left = self.left(lease.etcd_lease).await?;
        Ok(left.and_then(|left| left.checked_sub(lease.stored.delay)))
    }

    /// Whether a lease is held, and not in its lock delay. Without one its key tells.
    pub(super) async fn is_held(&self, lease: &FoundLease) -> Result<bool, EtcdError> {
        Ok(lease.stored.delay == 0 || self.held_for(lease).await?.is_some())
    }

    /// How long the log is, told by the member that has given an answer, after it has.
    pub(super) async fn log_after(&self, answered: &Header) -> Result<Log, EtcdError> {
        for _ in 0..STATUSES {
            match self.status().await {
                Ok(status) => {
                    if let Some(log) = Log::read(answered, &status) {
                        return Ok(log);
                    }
                }
                Err(error) if error.is_refusal() => break,
                Err(error) => return Err(error),
            }
        }
        Ok(Log::default())
    }

    pub(super) async fn status(&self) -> Result<StatusAnswer, EtcdError> {
        let nothing = json!({});
        self.gateway.call("/v3/maintenance/status", &nothing).await
    }
}
