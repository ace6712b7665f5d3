//! Execution of steps on token counters. If a step needs an epoch, this module begins one.

use std::sync::Arc;

use tokio::time::Instant;

use super::Store;
use crate::{
    epochs::{SourceId, partition_of},
    lease::{
        Backend, LeaseError,
        backend::{BlankCounter, Counters, Granted, Reply, Seen, Step},
        counters::KnownCounters,
        single_flight::Flight,
    },
    metrics,
    token::Resource,
};

/// Maximum number of executions of a step for one call. Many repetitions mean that other issuers
/// keep changing the counter, that the store keeps losing its data, or that its replies are slow.
const ATTEMPTS: usize = 12;

impl<B: Backend> Store<B> {
    /// Executes a step that may take a token. Before this method returns a lease, the source has
    /// recorded the epoch of its token.
    pub(super) async fn take_token(
        &self,
        resource: &Resource,
        step: Step<'_>,
    ) -> Result<Reply, LeaseError> {
        let Some(counters) = &self.counters else {
            return self.execute(resource, step).await;
        };
        counters.learn_source().await?;
        for _ in 0..ATTEMPTS {
            let reply = self.execute(resource, step).await?;
            let Reply::Granted(Granted {
                counted: Some((epoch, n)),
                ttl,
                ..
            }) = reply
            else {
                return Ok(reply);
            };
            let granted_at = Instant::now();
            let recorded = counters.record_grant(partition_of(resource), epoch, n);
            if recorded.await? && granted_at.elapsed() < ttl / 2 {
                return Ok(reply);
            }
            // Much of the TTL has passed, or the epoch has ended. The repeated step restarts the
            // TTL. If the epoch has ended, the step takes a token of a later epoch, or the lease is
            // lost.
        }
        Err(LeaseError::unavailable(UnstableCounter))
    }

    /// Executes a step that keeps the token of a lease. Such a step does not need the source of
    /// epochs.
    pub(super) async fn keep_token(
        &self,
        resource: &Resource,
        step: Step<'_>,
    ) -> Result<Reply, LeaseError> {
        let reply = self.execute(resource, step).await?;
        if let (Some(counters), Reply::Granted(granted)) = (&self.counters, &reply)
            && let Some((epoch, n)) = granted.counted
        {
            counters.record_renewal(partition_of(resource), epoch, n);
        }
        Ok(reply)
    }

    /// Executes a step. If the step needs an epoch, begins one and repeats the step.
    async fn execute(&self, resource: &Resource, step: Step<'_>) -> Result<Reply, LeaseError> {
        let (mut flight, mut replace) = (None, false);
        for _ in 0..ATTEMPTS {
            let seen = Seen {
                replace,
                ..self.seen(resource)
            };
            let reply = match self.backend.step(resource, step, seen).await {
                Ok(reply) => reply,
                Err(error) => return Err(fail(flight, error)),
            };
            match (reply, &flight) {
                // Only one request at a time continues from here. The step is repeated first,
                // because an earlier request may have begun the epoch by now.
                (Reply::NeedsEpoch(_) | Reply::Behind, None) => {
                    let partition = partition_of(resource);
                    flight = Some(self.counters()?.flight(partition).await?);
                }
                (Reply::NeedsEpoch(counter), Some(_)) => {
                    if let Err(error) = self.begin_epoch(resource, &counter).await {
                        return Err(fail(flight, error));
                    }
                }
                (Reply::Behind, Some(_)) => {
                    // The reply may come from a server that was demoted. If the counter is still
                    // lower when the step is repeated, it was restored from an earlier copy, and
                    // must not be used.
                    let partition = partition_of(resource);
                    // If the source has ended the epoch, the process has already logged this. The
                    // state that it has seen is then the end of that epoch, not that of a counter.
                    if !self.counters()?.has_ended(partition) {
                        tracing::warn!(
                            partition,
                            "the token counter is lower than this process has seen: the process reads it again, and \
                             replaces it if it is still lower"
                        );
                    }
                    replace = true;
                }
                // A renewal that keeps its token reads the id of the source only now, because only
                // this reply depends on it.
                (Reply::OtherSource(_), _) if self.counters()?.source().is_none() => {
                    self.counters()?.learn_source().await?;
                }
                (Reply::OtherSource(theirs), _) => {
                    return Err(fail(flight, self.mismatch(theirs)));
                }
                (reply, _) => return Ok(reply),
            }
        }
        Err(fail(flight, LeaseError::unavailable(UnstableCounter)))
    }

    /// Takes an epoch for exactly this counter, and begins it.
    async fn begin_epoch(
        &self,
        resource: &Resource,
        counter: &BlankCounter,
    ) -> Result<(), LeaseError> {
        let partition = partition_of(resource);
        let epoch = self
            .counters()?
            .next_epoch(partition, counter.epoch)
            .await?;
        let seen = self.seen(resource);
        let began = self.backend.begin_epoch(resource, counter, epoch, seen);
        if began.await? {
            metrics::count("tower_fence_epochs_begun_total");
            tracing::info!(partition, %epoch, "began an epoch");
        }
        Ok(())
    }

    /// Returns the highest state of the counter of a resource's partition that this process has
    /// seen.
    pub(super) fn seen(&self, resource: &Resource) -> Seen<'_> {
        Counters::of(self.counters.as_deref()).seen(resource)
    }

    fn counters(&self) -> Result<&Arc<KnownCounters>, LeaseError> {
        let counters = self.counters.as_ref();
        counters.ok_or_else(|| LeaseError::misconfigured(NoEpochs))
    }

    fn mismatch(&self, theirs: String) -> LeaseError {
        let ours = self
            .counters
            .as_ref()
            .and_then(|counters| counters.source());
        LeaseError::misconfigured(SourceMismatch {
            key_prefix: self.backend.key_prefix().into(),
            ours: ours.cloned(),
            theirs,
        })
    }
}

/// Passes a failure on to the requests that wait for this request.
fn fail(flight: Option<Flight<'_>>, error: LeaseError) -> LeaseError {
    match flight {
        Some(flight) => flight.fail(error),
        None => error,
    }
}

/// Error for a counter that belongs to another application.
#[derive(Debug, thiserror::Error)]
#[error(
    "token counters under the key prefix `{key_prefix}` belong to the source of epochs `{theirs}`, and this \
     issuer's is `{}`: choose a key prefix for each database (`key_prefix`), or, if the database was recreated, \
     delete the keys `{key_prefix}:*`; if an issuer with that source was started by mistake, stop it and delete \
     only the counters that name the source: the keys `{key_prefix}:{{N}}:clock` in Redis, or `{key_prefix}:counter:N` \
     in etcd",
    .ours.as_ref().map_or("", SourceId::as_str)
)]
struct SourceMismatch {
    key_prefix: Box<str>,
    ours: Option<SourceId>,
    theirs: String,
}

/// Error for a store that needs a source of epochs, and whose driver has none.
#[derive(Debug, thiserror::Error)]
#[error("this lease store needs a source of epochs: create its driver with `Driver::with_epochs`")]
struct NoEpochs;

/// Error for a step that was repeated too often. Unlike a conflict on one resource, such an error
/// may concern the whole store.
#[derive(Debug, thiserror::Error)]
#[error(
    "gave up because the token counter kept changing or was lost repeatedly, or the store is slow"
)]
struct UnstableCounter;
