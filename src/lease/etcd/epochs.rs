//! Beginning an epoch on a clock that has none.

use serde_json::json;

use super::{
    clock::{ClockState, StoredClock, UnusableClock},
    life::Log,
    look::Look,
    messages::{Header, TxnAnswer, has_value, put, written_at},
    server::Etcd,
    stored::value,
};
use crate::{
    epochs::{SourceId, partition_of},
    lease::LeaseError,
    metrics,
    token::Resource,
};

impl Etcd {
    /// Has the clock of a resource's partition usable, unless another issuer is faster; to ask again tells. Whoever asks
    /// has learned the source of epochs, which a new clock carries.
    ///
    /// # Errors
    ///
    /// [`LeaseError::Misconfigured`] where the clock belongs to another source; [`LeaseError::Unavailable`] where there is
    /// no epoch.
    pub(super) async fn prepare_clock(&self, resource: &Resource) -> Result<(), LeaseError> {
        let flight = self.memory().flight(partition_of(resource)).await?;
        // Whoever was first has begun the epoch perhaps.
        let prepared = async {
            let Look {
                header, log, clock, ..
            } = self.look(resource, None).await?;
            match clock {
                ClockState::Usable(_) => Ok(()),
                ClockState::OtherSource(theirs) => Err(self.mismatch(resource, theirs)),
                ClockState::NeedsEpoch(clock) => {
                    self.begin_epoch(resource, clock, &header, log).await
                }
            }
        };
        prepared.await.map_err(|error| flight.fail(error))
    }

    /// Takes an epoch for this very clock, and begins it there.
    async fn begin_epoch(
        &self,
        resource: &Resource,
        clock: UnusableClock,
        header: &Header,
        log: Log,
    ) -> Result<(), LeaseError> {
        let partition = partition_of(resource);
        let key = self.keys().clock(partition);
        let (blank, revision) = match clock.blank {
            Some(blank) => (blank, clock.revision),
            None => {
                let source = self.memory().source();
                let lead = match log.is_told() {
                    true => log.lead_reached(self.status().await?.header.revision),
                    false => None,
                };
                let blank = StoredClock {
                    source: source.map_or(String::new(), ToString::to_string),
                    history: header.cluster_id,
                    incarnation: rand::random(),
                    lead,
                    epoch: clock.epoch,
                    begun: false,
                };
                let compare = written_at(&key, clock.revision);
                let body =
                    json!({ "compare": [compare], "success": [put(&key, &value(&blank), 0)] });
                let written: TxnAnswer = self.gateway().call("/v3/kv/txn", &body).await?;
                if !written.succeeded || written.header.cluster_id != blank.history {
                    return Ok(());
                }
                (blank, written.header.revision)
            }
        };
        let epoch = self.memory().next_epoch(partition, blank.epoch).await?;
        let begun = StoredClock {
            epoch: epoch.get(),
            begun: true,
            ..blank.clone()
        };
        // The value tells it from a blank clock that another life has put in this revision; the revision, from itself,
        // put once more by a request that was repeated.
        let compare = [has_value(&key, &value(&blank)), written_at(&key, revision)];
        let body = json!({ "compare": compare, "success": [put(&key, &value(&begun), 0)] });
        let written: TxnAnswer = self.gateway().call("/v3/kv/txn", &body).await?;
        if written.succeeded {
            metrics::count("tower_fence_epochs_begun_total");
            tracing::info!(partition, %epoch, "began an epoch");
        }
        Ok(())
    }

    fn mismatch(&self, resource: &Resource, theirs: String) -> LeaseError {
        LeaseError::misconfigured(SourceMismatch {
            key_prefix: self.keys().prefix().into(),
            partition: partition_of(resource),
            ours: self.memory().source().cloned(),
            theirs,
        })
    }
}

/// The clock belongs to another application.
#[derive(Debug, thiserror::Error)]
#[error(
    "the clock of partition {partition} under the key prefix `{key_prefix}` belongs to the source of \
     epochs `{theirs}`, and this issuer's is `{}`: choose a key prefix for each database \
     (`key_prefix`), or, where the database was made anew, delete the keys that begin with `{key_prefix}:`",
    .ours.as_ref().map_or("", SourceId::as_str)
)]
struct SourceMismatch {
    key_prefix: Box<str>,
    partition: u8,
    ours: Option<SourceId>,
    theirs: String,
}
