//! Running scripts that may need an epoch, and beginning one.

use redis::{Script, ScriptInvocation};

use super::{
    answer::{Answer, Granted, UnusableClock, unexpected},
    scripts::Scripts,
};
use crate::{
    epochs::{SourceId, partition_of},
    lease::{LeaseError, single_flight::Flight},
    metrics,
    token::Resource,
};

/// How often a script is run for one call before that gives up: each time means that another issuer
/// was faster, or that the server changed its history again.
const ATTEMPTS: usize = 12;

/// How the arguments of a script are added that it has beside those of all.
pub(super) trait Arguments: Fn(&mut ScriptInvocation<'_>) + Sync {}
impl<F: Fn(&mut ScriptInvocation<'_>) + Sync> Arguments for F {}

impl Scripts {
    /// Runs a script that may grant.
    pub(super) async fn granting(
        &self,
        script: &Script,
        resource: &Resource,
        arguments: &impl Arguments,
    ) -> Result<Answer, LeaseError> {
        self.memory().learn_source().await?;
        let partition = partition_of(resource);
        for _ in 0..ATTEMPTS {
            let answer = self.attempts(script, resource, arguments).await?;
            let Answer::Granted(Granted { epoch, n, .. }) = answer else {
                return Ok(answer);
            };
            if self.memory().record_grant(partition, epoch, n).await? {
                return Ok(answer);
            }
            // The epoch is over. The script grants anew, or says that the lease is lost.
        }
        Err(unexpected())
    }

    /// Runs a script. Where that needs an epoch, begins one and runs it again.
    pub(super) async fn attempts(
        &self,
        script: &Script,
        resource: &Resource,
        arguments: &impl Arguments,
    ) -> Result<Answer, LeaseError> {
        self.check_once().await?;
        let partition = partition_of(resource);
        let (mut flight, mut replaces_clock) = (None, false);
        for _ in 0..ATTEMPTS {
            let mut invocation = self.invoke(script, resource, replaces_clock);
            arguments(&mut invocation);
            let answer = match self.run(&invocation).await.and_then(Answer::parse) {
                Ok(answer) => answer,
                Err(error) => return Err(fail(flight, error)),
            };
            match (answer, &flight) {
                // One request at a time goes on from here. To ask again tells whether another one,
                // which was first, has begun the epoch.
                (Answer::NeedsEpoch(_) | Answer::Behind, None) => {
                    flight = Some(self.memory().flight(partition).await?);
                }
                (Answer::NeedsEpoch(clock), Some(_)) => {
                    if let Err(error) = self.begin_epoch(resource, &clock).await {
                        return Err(fail(flight, error));
                    }
                }
                (Answer::Behind, Some(_)) => {
                    // It may be that of a server that was deposed. Where it is not, it was copied
                    // back, and must not count on from there.
                    tracing::warn!(partition, "the clock has gone back; looking for the master");
                    self.server().find_again().await;
                    replaces_clock = true;
                }
                // A renewal that keeps its token asks no source, until its epoch turns out to be over.
                (Answer::OtherSource(_), _) if self.memory().source().is_none() => {
                    self.memory().learn_source().await?;
                }
                (Answer::OtherSource(theirs), _) => return Err(self.mismatch(partition, theirs)),
                (answer, _) => return Ok(answer),
            }
        }
        Err(fail(flight, unexpected()))
    }

    /// Runs a script that ends a lease. Where it may have run twice, and the second run finds no lease, the first one has
    /// ended it, unless it was over before.
    pub(super) async fn ending(
        &self,
        script: &ScriptInvocation<'_>,
        resource: &Resource,
    ) -> Result<bool, LeaseError> {
        self.check_once().await?;
        let answer = self.server().call(script).await;
        let (answer, again) = answer.map_err(|error| self.server().unavailable(error))?;
        match Answer::parse(answer)? {
            Answer::NeedsEpoch(_) | Answer::Behind | Answer::OtherSource(_) => {
                // The lease has ended; the next in line needs an epoch first. Where that fails,
                // `watch_lease_end` tries again.
                let _ = self.tick(resource, None).await;
                Ok(true)
            }
            Answer::Lost => Ok(again),
            answer => Ok(matches!(answer, Answer::Released)),
        }
    }

    /// Takes an epoch for this very clock, and begins it there.
    async fn begin_epoch(
        &self,
        resource: &Resource,
        clock: &UnusableClock,
    ) -> Result<(), LeaseError> {
        let partition = partition_of(resource);
        let epoch = self.memory().next_epoch(partition, clock.epoch).await?;
        let mut script = self.invoke(self.begin_epoch_script(), resource, false);
        script
            .arg(&clock.history)
            .arg(&clock.incarnation)
            .arg(epoch.get());
        let began: bool = self.run(&script).await?;
        if began {
            metrics::count("tower_fence_epochs_begun_total");
            tracing::info!(partition, %epoch, "began an epoch");
        }
        Ok(())
    }

    fn mismatch(&self, partition: u8, theirs: String) -> LeaseError {
        LeaseError::unavailable(SourceMismatch {
            key_prefix: self.key_prefix().into(),
            partition,
            ours: self.memory().source().cloned(),
            theirs,
        })
    }
}

/// A failure, which is shared with the requests that wait for this one.
fn fail(flight: Option<Flight<'_>>, error: LeaseError) -> LeaseError {
    match flight {
        Some(flight) => flight.fail(error),
        None => error,
    }
}

/// The clock belongs to another application.
#[derive(Debug, thiserror::Error)]
#[error(
    "the clock of partition {partition} under the key prefix `{key_prefix}` belongs to the source of \
     epochs `{theirs}`, and this issuer's is `{}`: choose a key prefix for each database \
     (`key_prefix`), or, where the database was made anew, delete the keys `{key_prefix}:*`",
    .ours.as_ref().map_or("", SourceId::as_str)
)]
struct SourceMismatch {
    key_prefix: Box<str>,
    partition: u8,
    ours: Option<SourceId>,
    theirs: String,
}
