//! Epochs of the token counters.

use serde_json::{Value, json};
use tower_fence::{
    Resource,
    epochs::{Epoch, SourceId, partition_of},
    lease::{
        LeaseError,
        backend::{BlankCounter, Reply, Seen},
    },
};

use crate::{
    counter::{Counter, CounterState, CounterView, StoredCounter, mark, read_mark},
    error::EtcdError,
    etcd::Etcd,
    gateway::To,
    incarnation::{Log, StoredIncarnation},
    messages::{Header, StatusAnswer, created_at, get_range, has_value, put, written_at},
    stored::value,
};

/// Maximum number of Status calls. Each further call means that another member has responded,
/// because an endpoint has failed in the meantime or because a load balancer distributes the calls.
/// If three members respond at random, about one in seven hundred series of 16 calls does not reach
/// the right member.
const STATUS_CALLS: usize = 16;

impl Etcd {
    /// Returns comparisons that hold if neither the counter nor the incarnation of etcd has
    /// changed.
    pub(crate) fn is_unchanged(&self, resource: &Resource, counter: &Counter) -> [Value; 3] {
        let key = self.keys.counter(partition_of(resource));
        [
            written_at(&key, counter.base),
            // After a restore from an older copy, another counter may have been written in the same
            // revision.
            has_value(&key, &counter.value),
            has_value(&self.keys.incarnation(), &counter.incarnation),
        ]
    }

    /// Returns the blank counter on which an epoch can begin, and writes one if there is none.
    /// Returns [`Reply::Again`] if the counter no longer needs an epoch.
    pub(crate) async fn needs_epoch(
        &self,
        resource: &Resource,
        mut counter_view: CounterView,
        seen: &Seen<'_>,
    ) -> Result<Reply, LeaseError> {
        let partition = partition_of(resource);
        self.memory.forget_counter(partition);
        let Some(source) = seen.source else {
            // The driver reads the source, and repeats the step.
            return Ok(Reply::OtherSource(String::new()));
        };
        if counter_view.log == Log::default() {
            counter_view.log = self.log_after(&counter_view.header).await?;
        }
        let epoch = match counter_view.judge(seen) {
            CounterState::OtherSource(theirs) => return Ok(Reply::OtherSource(theirs)),
            CounterState::Blank(blank) => return Ok(Reply::NeedsEpoch(blank)),
            CounterState::Begun {
                is_used_up: false, ..
            } => return Ok(Reply::Again),
            CounterState::Begun { counter, .. } => counter.epoch.get(),
            CounterState::Over(epoch) => epoch,
        };
        if counter_view.counter.is_none()
            && let Some(theirs) = self.other_source(source).await?
        {
            return Ok(Reply::OtherSource(theirs));
        }
        let (incarnation_key, counter_key) =
            (self.keys.incarnation(), self.keys.counter(partition));
        let mut compare = vec![match &counter_view.incarnation {
            None => created_at(&incarnation_key, 0),
            Some(kv) => has_value(&incarnation_key, &kv.value.0),
        }];
        let written = counter_view
            .counter
            .as_ref()
            .map_or(0, |kv| kv.mod_revision);
        compare.push(written_at(&counter_key, written));
        let mut writes = vec![];
        let incarnation = match counter_view.current_incarnation() {
            Some(incarnation) => incarnation,
            None => {
                let incarnation = self.new_incarnation(&counter_view).await?;
                writes.push(put(&incarnation_key, &value(&incarnation), 0));
                incarnation
            }
        };
        let blank = StoredCounter {
            source: source.to_string(),
            incarnation: incarnation.id,
            id: rand::random(),
            epoch,
            begun: false,
        };
        writes.push(put(&counter_key, &value(&blank), 0));
        let answer = self.txn(To::Any, &compare, &writes, &[]).await?;
        if !answer.succeeded || answer.header.cluster_id != incarnation.cluster {
            return Ok(Reply::Again);
        }
        let mark = mark(answer.header.revision, &blank);
        Ok(Reply::NeedsEpoch(BlankCounter::new(epoch, mark)))
    }

    /// Returns the source of epochs to which the counters of other partitions belong, or `None` if
    /// one of them belongs to this source, or if there are none. Without this check, an issuer that
    /// was started by mistake would become the owner of each partition that no issuer has used. Of
    /// two issuers that write the first counter at the same time, one fails, because both also
    /// write the incarnation of etcd.
    async fn other_source(&self, ours: &SourceId) -> Result<Option<String>, EtcdError> {
        let reads = [get_range(&self.keys.counters())];
        let answer = self.read(&reads).await?;
        let kvs = answer.reads().flat_map(|read| read.kvs);
        let counters = kvs.filter_map(|kv| serde_json::from_slice(&kv.value.0).ok());
        let sources: Vec<String> = counters
            .map(|counter: StoredCounter| counter.source)
            .collect();
        let is_ours = sources.iter().any(|source| source == ours.as_str());
        Ok(sources.into_iter().next().filter(|_| !is_ours))
    }

    /// Returns a new incarnation of etcd. It has a lead if the length of the log is known.
    async fn new_incarnation(
        &self,
        counter_view: &CounterView,
    ) -> Result<StoredIncarnation, EtcdError> {
        // The revision must come from the member that has reported the length of the log, because
        // another member may lag.
        let later = match counter_view.log == Log::default() {
            true => Log::default(),
            false => self.log_after(&counter_view.header).await?,
        };
        let lead = later
            .revision()
            .and_then(|later| counter_view.log.lead_reached(later));
        Ok(StoredIncarnation {
            id: rand::random(),
            cluster: counter_view.header.cluster_id,
            lead,
        })
    }

    /// Begins an epoch on a blank counter. Returns false if the counter has changed.
    pub(crate) async fn begin_epoch(
        &self,
        resource: &Resource,
        blank: &BlankCounter,
        epoch: Epoch,
    ) -> Result<bool, EtcdError> {
        let Some((revision, stored)) = read_mark(&blank.mark) else {
            return Ok(false);
        };
        let key = self.keys.counter(partition_of(resource));
        // The value distinguishes this counter from one that another incarnation of etcd has
        // written in the same revision. The revision distinguishes it from a counter with the same
        // value that a repeated call has written.
        let compare = [has_value(&key, &value(&stored)), written_at(&key, revision)];
        let begun = StoredCounter {
            epoch: epoch.get(),
            begun: true,
            ..stored
        };
        let write = put(&key, &value(&begun), 0);
        Ok(self.txn(To::Any, &compare, &[write], &[]).await?.succeeded)
    }

    /// Reads the length of the log from the member that gave the response. Returns an empty [`Log`]
    /// if the members do not report the length to this user. Returns an error if only other members
    /// respond, because a restore from a snapshot would not be detected without the length.
    pub(crate) async fn log_after(&self, answered: &Header) -> Result<Log, EtcdError> {
        let first = self.gateway.current();
        for n in 0..STATUS_CALLS {
            match self.status(first + n).await {
                Ok(status) => {
                    if let Some(log) = Log::read(answered, &status) {
                        return Ok(log);
                    }
                }
                Err(error) if error.hides_status() => {
                    self.status_warning.call_once(|| {
                        tracing::warn!(
                            error = error.to_string(),
                            "etcd does not report the length of its log to this user, so this store cannot detect \
                             that etcd was restored from a snapshot"
                        );
                    });
                    return Ok(Log::default());
                }
                Err(error) => return Err(error),
            }
        }
        Err(EtcdError::another_member())
    }

    async fn status(&self, at: usize) -> Result<StatusAnswer, EtcdError> {
        let status = "/v3/maintenance/status";
        self.gateway.call(To::AnyFrom(at), status, &json!({})).await
    }
}
