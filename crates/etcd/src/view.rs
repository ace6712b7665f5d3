//! Transactions on a resource, which also read its state.

use serde_json::Value;
use tower_fence::{Resource, epochs::partition_of};

use crate::{
    counter::CounterView,
    error::EtcdError,
    etcd::Etcd,
    gateway::To,
    incarnation::Log,
    messages::{KeyValue, TxnAnswer, count, get, get_first},
    stored::{FoundLease, FoundPosition, StoredLease},
};

/// State of a resource in one revision.
#[derive(Debug)]
pub(crate) struct View {
    pub(crate) counter: CounterView,
    /// The key that blocks the resource: that of a lease, or a key of another program.
    pub(crate) blocked_by: Option<KeyValue>,
    /// The lease with that key, or `None` if another program has written the key.
    pub(crate) lease: Option<FoundLease>,
    /// The number of waiting requests.
    pub(crate) waiting: u64,
    /// The revision in which the first waiting request joined the queue, if it was read.
    pub(crate) first: Option<i64>,
    /// The position under the stored lease id, if it was read.
    pub(crate) position: Option<FoundPosition>,
}

/// Additional data that a read returns.
#[derive(Clone, Copy, Default)]
pub(crate) struct Reads<'a> {
    /// The position under this stored lease id, if it is to be read.
    pub(crate) position: Option<&'a str>,
    /// Whether to read which position is the first. For that, etcd has to sort the queue.
    pub(crate) first: bool,
}

impl View {
    /// Returns whether the resource is blocked by a key that is attached to this etcd lease.
    pub(crate) fn is_blocked_by(&self, etcd_lease: i64) -> bool {
        self.blocked_by
            .as_ref()
            .is_some_and(|kv| kv.lease == etcd_lease)
    }

    /// Returns whether the key has this value, with a valid token, and is attached to this etcd
    /// lease.
    pub(crate) fn is_written(&self, stored: &StoredLease, etcd_lease: i64) -> bool {
        let lease = self.lease.as_ref();
        lease.is_some_and(|lease| lease.etcd_lease == etcd_lease && lease.stored == *stored)
    }

    /// Returns the lease, if it has this stored id.
    pub(crate) fn lease_of(&self, id: &str) -> Option<&FoundLease> {
        self.lease.as_ref().filter(|lease| lease.stored.id == id)
    }
}

impl Etcd {
    /// Reads a resource.
    pub(crate) async fn view(
        &self,
        resource: &Resource,
        reads: Reads<'_>,
    ) -> Result<View, EtcdError> {
        self.write(resource, reads, &[], vec![]).await
    }

    /// Writes if the comparisons hold, and reads the resource in either case. The caller determines
    /// from the view whether the write took place, because the transaction may have been executed
    /// twice.
    pub(crate) async fn write(
        &self,
        resource: &Resource,
        reads: Reads<'_>,
        compare: &[Value],
        writes: Vec<Value>,
    ) -> Result<View, EtcdError> {
        let reads = self.operations(resource, reads);
        let writes = [writes, reads.clone()].concat();
        Ok(Self::parse(
            self.txn(To::Any, compare, &writes, &reads).await?,
        ))
    }

    /// Like [`write`](Self::write), but sends the transaction only once, and returns an error if
    /// its outcome is unknown. Also returns whether the comparisons held. If they did, the view
    /// lacks the additional data: etcd would sort the queue within the write, and so delay the
    /// writes of all clients.
    pub(crate) async fn write_once(
        &self,
        resource: &Resource,
        reads: Reads<'_>,
        compare: &[Value],
        writes: Vec<Value>,
    ) -> Result<(bool, View), EtcdError> {
        let writes = [writes, self.operations(resource, Reads::default())].concat();
        let reads = self.operations(resource, reads);
        let answer = self.txn(To::Current, compare, &writes, &reads).await?;
        Ok((answer.succeeded, Self::parse(answer)))
    }

    /// Returns the operations that read a resource.
    fn operations(&self, resource: &Resource, Reads { position, first }: Reads<'_>) -> Vec<Value> {
        let queue = self.keys.queue(resource);
        let mut reads = vec![
            get(&self.keys.incarnation()),
            get(&self.keys.counter(partition_of(resource))),
            get(&self.keys.lease(resource)),
            if first {
                get_first(&queue)
            } else {
                count(&queue)
            },
        ];
        reads.extend(position.map(|id| get(&self.keys.position(resource, id))));
        reads
    }

    fn parse(answer: TxnAnswer) -> View {
        let header = answer.header;
        let mut reads = answer.reads();
        let mut read = || reads.next().unwrap_or_default();
        let mut key = || read().kvs.into_iter().next();
        let (incarnation, counter, blocked_by) = (key(), key(), key());
        let queue = read();
        View {
            counter: CounterView {
                header,
                incarnation,
                counter,
                log: Log::default(),
            },
            lease: blocked_by.as_ref().and_then(FoundLease::read),
            blocked_by,
            waiting: queue.count,
            first: queue.kvs.first().map(|first| first.create_revision),
            position: read().kvs.first().map(FoundPosition::read),
        }
    }
}
