//! Transactions on a resource, and etcd leases.

use std::{sync::Arc, time::Duration};

use serde_json::{Value, json};
use tower_fence::{
    Resource,
    epochs::{Epoch, partition_of},
    lease::{
        LeaseError,
        backend::{BlankCounter, Reply, Seen},
    },
};

use crate::{
    counter::{Counter, CounterState, Row, StoredCounter, mark, read_mark},
    error::EtcdError,
    gateway::Gateway,
    keys::Keys,
    life::{Log, StoredLife},
    memory::Memory,
    messages::{
        Header, KeyValue, LeaseAnswer, RangeAnswer, StatusAnswer, Streamed, TxnAnswer, base64,
        count, created_at, get, get_first, has_value, put, written_at,
    },
    stored::{FoundLease, FoundPosition, StoredId, value},
};

/// How often a step looks and writes before it gives up: each time means that another request was
/// faster.
pub(crate) const ATTEMPTS: usize = 64;
/// How often a status is asked for: each time means that another member has answered, as behind a
/// load balancer.
const STATUSES: usize = 4;

pub(crate) struct Etcd {
    pub(crate) gateway: Gateway,
    pub(crate) keys: Keys,
    pub(crate) memory: Memory,
}

/// A resource in one revision.
#[derive(Debug)]
pub(crate) struct View {
    pub(crate) row: Row,
    /// What blocks the resource: a lease, or a key of another program.
    pub(crate) blocked_by: Option<KeyValue>,
    pub(crate) lease: Option<FoundLease>,
    /// How many requests wait.
    pub(crate) waiting: u64,
    /// Since when the first of them does, if that was read.
    pub(crate) first: Option<i64>,
    pub(crate) position: Option<FoundPosition>,
}

/// What is read beside the lease and its counter.
#[derive(Clone, Copy, Default)]
pub(crate) struct Reads<'a> {
    /// The position under this lease id.
    pub(crate) position: Option<&'a StoredId>,
    /// Which position is the first. etcd sorts the queue for that.
    pub(crate) first: bool,
}

impl View {
    /// Whether the resource is blocked by a key that ends with this etcd lease.
    pub(crate) fn is_blocked_by(&self, etcd_lease: i64) -> bool {
        self.blocked_by
            .as_ref()
            .is_some_and(|kv| kv.lease == etcd_lease)
    }

    /// The lease, if it is under this id.
    pub(crate) fn lease_of(&self, id: &StoredId) -> Option<&FoundLease> {
        self.lease.as_ref().filter(|lease| lease.stored.id == *id)
    }
}

/// The id of an etcd lease: a positive number that no other process draws.
pub(crate) fn random_id() -> i64 {
    rand::random_range(1..=i64::MAX)
}

impl Etcd {
    /// Makes sure that etcd answers.
    pub(crate) async fn check(&self) -> Result<(), EtcdError> {
        let body = json!({ "key": base64(self.keys.life()) });
        let answer: RangeAnswer = self.gateway.call("/v3/kv/range", &body).await?;
        match answer.header.cluster_id {
            0 => Err(self.gateway.meaningless()),
            _ => Ok(()),
        }
    }

    pub(crate) async fn txn(
        &self,
        compare: &[Value],
        success: &[Value],
        failure: &[Value],
    ) -> Result<TxnAnswer, EtcdError> {
        let body = json!({ "compare": compare, "success": success, "failure": failure });
        self.checked(self.gateway.call("/v3/kv/txn", &body).await?)
    }

    fn checked(&self, answer: TxnAnswer) -> Result<TxnAnswer, EtcdError> {
        match answer.header.cluster_id {
            0 => Err(self.gateway.meaningless()),
            _ => Ok(answer),
        }
    }

    /// Reads a resource.
    pub(crate) async fn look(
        &self,
        resource: &Resource,
        reads: Reads<'_>,
    ) -> Result<View, EtcdError> {
        self.write(resource, reads, &[], vec![]).await
    }

    /// Writes if these comparisons hold, and reads the resource in any case. What it reads shows
    /// whether it has written: the transaction may have been executed twice.
    pub(crate) async fn write(
        &self,
        resource: &Resource,
        reads: Reads<'_>,
        compare: &[Value],
        writes: Vec<Value>,
    ) -> Result<View, EtcdError> {
        let body = self.body(resource, reads, compare, writes);
        self.view(self.gateway.call("/v3/kv/txn", &body).await?)
    }

    /// Like [`write`](Self::write), and sent once: if the outcome is unknown, that is the error.
    pub(crate) async fn write_once(
        &self,
        resource: &Resource,
        reads: Reads<'_>,
        compare: &[Value],
        writes: Vec<Value>,
    ) -> Result<View, EtcdError> {
        let body = self.body(resource, reads, compare, writes);
        self.view(self.gateway.call_once("/v3/kv/txn", &body).await?)
    }

    fn body(
        &self,
        resource: &Resource,
        Reads { position, first }: Reads<'_>,
        compare: &[Value],
        mut writes: Vec<Value>,
    ) -> Value {
        let queue = self.keys.queue(resource);
        let mut reads = vec![
            get(&self.keys.life()),
            get(&self.keys.counter(partition_of(resource))),
            get(&self.keys.lease(resource)),
            if first {
                get_first(&queue)
            } else {
                count(&queue)
            },
        ];
        reads.extend(position.map(|id| get(&self.keys.position(resource, id))));
        writes.extend(reads.iter().cloned());
        json!({ "compare": compare, "success": writes, "failure": reads })
    }

    fn view(&self, answer: TxnAnswer) -> Result<View, EtcdError> {
        let answer = self.checked(answer)?;
        let header = answer.header;
        let mut reads = answer.reads();
        let mut read = || reads.next().unwrap_or_default();
        let mut key = || read().kvs.into_iter().next();
        let (life, counter, blocked_by) = (key(), key(), key());
        let queue = read();
        Ok(View {
            row: Row {
                header,
                life,
                counter,
                log: Log::default(),
            },
            lease: blocked_by.as_ref().and_then(FoundLease::read),
            blocked_by,
            waiting: queue.count,
            first: queue.kvs.first().map(|first| first.create_revision),
            position: read().kvs.first().map(FoundPosition::read),
        })
    }

    /// Compares the counter that a token is taken from, and the life that it belongs to.
    pub(crate) fn is_unchanged(&self, resource: &Resource, counter: &Counter) -> [Value; 2] {
        let key = self.keys.counter(partition_of(resource));
        [
            written_at(&key, counter.base),
            has_value(&self.keys.life(), &counter.life),
        ]
    }

    /// Has a blank counter for an epoch to begin on; [`Reply::Again`] if the counter needs none by
    /// now.
    pub(crate) async fn needs_epoch(
        &self,
        resource: &Resource,
        row: &mut Row,
        seen: &Seen<'_>,
    ) -> Result<Reply, LeaseError> {
        let partition = partition_of(resource);
        self.memory.forget_counter(partition);
        let Some(source) = seen.source else {
            return Ok(Reply::OtherSource(String::new()));
        };
        if row.log == Log::default() {
            row.log = self.log_after(&row.header).await?;
        }
        let epoch = match row.judge(seen) {
            CounterState::OtherSource(theirs) => return Ok(Reply::OtherSource(theirs)),
            CounterState::Blank(blank) => return Ok(Reply::NeedsEpoch(blank)),
            CounterState::Begun {
                is_used_up: false, ..
            } => return Ok(Reply::Again),
            CounterState::Begun { counter, .. } => counter.epoch.get(),
            CounterState::Over(epoch) => epoch,
        };
        let (life_key, counter_key) = (self.keys.life(), self.keys.counter(partition));
        let mut compare = vec![match &row.life {
            None => created_at(&life_key, 0),
            Some(kv) => has_value(&life_key, &kv.value.0),
        }];
        let written = row.counter.as_ref().map_or(0, |kv| kv.mod_revision);
        compare.push(written_at(&counter_key, written));
        let mut writes = vec![];
        let life = match row.current_life() {
            Some(life) => life,
            None => {
                let life = self.new_life(row).await?;
                writes.push(put(&life_key, &value(&life), 0));
                life
            }
        };
        let blank = StoredCounter {
            source: source.to_string(),
            life: life.id,
            incarnation: rand::random(),
            epoch,
            begun: false,
        };
        writes.push(put(&counter_key, &value(&blank), 0));
        let answer = self.txn(&compare, &writes, &[]).await?;
        if !answer.succeeded || answer.header.cluster_id != life.cluster {
            return Ok(Reply::Again);
        }
        let mark = mark(answer.header.revision, &blank);
        Ok(Reply::NeedsEpoch(BlankCounter::new(epoch, mark)))
    }

    async fn new_life(&self, row: &Row) -> Result<StoredLife, EtcdError> {
        let lead = match row.log == Log::default() {
            true => None,
            false => row.log.lead_reached(self.status().await?.header.revision),
        };
        Ok(StoredLife {
            id: rand::random(),
            cluster: row.header.cluster_id,
            lead,
        })
    }

    /// Begins an epoch on a blank counter; false if that has changed.
    pub(crate) async fn begin_epoch(
        &self,
        resource: &Resource,
        blank: &BlankCounter,
        epoch: Epoch,
    ) -> Result<bool, EtcdError> {
        let Some((revision, row)) = read_mark(&blank.mark) else {
            return Ok(false);
        };
        let key = self.keys.counter(partition_of(resource));
        // The value distinguishes the counter from one that another life has in this revision; the
        // revision, from itself if it was written once more by a repeated request.
        let compare = [has_value(&key, &value(&row)), written_at(&key, revision)];
        let begun = StoredCounter {
            epoch: epoch.get(),
            begun: true,
            ..row
        };
        let write = put(&key, &value(&begun), 0);
        Ok(self.txn(&compare, &[write], &[]).await?.succeeded)
    }

    /// The length of the log, reported by the member that has given an answer, after it has;
    /// nothing if members do not report it to this user.
    pub(crate) async fn log_after(&self, answered: &Header) -> Result<Log, EtcdError> {
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

    async fn status(&self) -> Result<StatusAnswer, EtcdError> {
        let nothing = json!({});
        self.gateway.call("/v3/maintenance/status", &nothing).await
    }

    /// Makes an etcd lease with this id. Returns for how many seconds it lasts: etcd has a shortest
    /// time.
    pub(crate) async fn make_lease(&self, id: i64, seconds: u64) -> Result<u64, EtcdError> {
        let body = json!({ "ID": id.to_string(), "TTL": seconds.to_string() });
        let made = self.gateway.call::<LeaseAnswer>("/v3/lease/grant", &body);
        match made.await {
            Ok(made) => Ok(made.ttl.unsigned_abs().max(seconds)),
            // The id is random, so it is this one, and the answer to the first attempt was lost.
            Err(error) if error.is_lease_there() => Ok(seconds),
            Err(error) => Err(error),
        }
    }

    /// Ends an etcd lease, with its key.
    pub(crate) async fn revoke(&self, id: i64) -> Result<(), EtcdError> {
        let body = json!({ "ID": id.to_string() });
        let revoked = self.gateway.call::<Value>("/v3/lease/revoke", &body);
        revoked.await.map(drop)
    }

    /// Ends an etcd lease in a task. If that fails it ends by its time.
    pub(crate) fn revoke_later(self: &Arc<Self>, id: i64) {
        let etcd = Arc::clone(self);
        tokio::spawn(async move { etcd.revoke(id).await });
    }

    /// Starts the time of an etcd lease anew. Returns what it has left in seconds, 0 if it has
    /// ended.
    pub(crate) async fn keep_alive(&self, id: i64) -> Result<u64, EtcdError> {
        let body = json!({ "ID": id.to_string() });
        let kept: Streamed<LeaseAnswer> = self.gateway.call("/v3/lease/keepalive", &body).await?;
        Ok(u64::try_from(kept.result.ttl).unwrap_or(0))
    }

    /// What an etcd lease has left in seconds; `None` if it has ended.
    pub(crate) async fn left(&self, id: i64) -> Result<Option<u64>, EtcdError> {
        let body = json!({ "ID": id.to_string() });
        let left: LeaseAnswer = self.gateway.call("/v3/lease/timetolive", &body).await?;
        Ok(u64::try_from(left.ttl).ok())
    }

    /// How long a resource stays blocked by a key, at least a second: etcd is no more exact.
    pub(crate) async fn blocked_for(&self, key: &KeyValue) -> Result<Duration, EtcdError> {
        let left = self.left(key.lease).await?.unwrap_or(0);
        Ok(Duration::from_secs(left.max(1)))
    }

    /// Whether a lease is held, and not in its lock delay. The key of a lease without one shows
    /// that by itself.
    pub(crate) async fn is_held(&self, lease: &FoundLease) -> Result<bool, EtcdError> {
        if lease.stored.delay == 0 {
            return Ok(true);
        }
        let left = self.left(lease.etcd_lease).await?;
        Ok(left.is_some_and(|left| left >= lease.stored.delay))
    }
}

/// Whole seconds, rounded up: etcd counts no others.
pub(crate) fn seconds(time: Duration) -> u64 {
    time.as_secs() + u64::from(time.subsec_nanos() > 0)
}

/// Nothing that a step read stayed as it was.
#[derive(Debug, thiserror::Error)]
#[error("other requests for the same lease are under way")]
pub(crate) struct TooMuchChange;
