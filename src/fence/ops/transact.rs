//! Transactions of all operations of the fence: beginning a transaction, running statements in it,
//! and retrying both if a retry may succeed.
//!
//! 1. A transaction that collides with another one (a deadlock, a serialization failure) has had no
//!    effect. It is retried after a random pause, until the lock timeout has passed.
//! 2. If a resource was last used on another timeline of the database, the fence first catches up
//!    with the failover.
//! 3. An *early* transaction, which began before its request, saves a round trip. If it does not
//!    admit the token, or if the resource was written to after it began, the statements run again
//!    in a transaction that begins after the request. The second transaction determines why a token
//!    is refused.
//! 4. If the connection of an early transaction turns out to be closed, the statements run on
//!    another connection, which is tested first.

use std::time::Duration;

use tokio::time::{Instant, sleep};

use crate::{
    chain::Chain,
    fence::{
        Fence,
        claims::Claims,
        error::{AdmitError, StaleToken},
        fault::{Failure, Fault},
        local::QueueKey,
        settings::Limits,
        sql::{Begin, FenceDatabase, Names, On},
        tx::Transaction,
    },
    time::after,
};

/// Requirements of the statements for their transaction.
pub(super) struct Plan<'a, DB: FenceDatabase> {
    limits: Limits,
    /// The resources, for catching up with a failover.
    claims: Option<&'a Claims>,
    begin: Begin,
    /// An open transaction for the first attempt.
    pub(super) open: Option<Transaction<DB>>,
}

impl<'a, DB: FenceDatabase> Plan<'a, DB> {
    /// Plans statements without an admission.
    pub(super) const fn new(limits: Limits) -> Self {
        Self {
            limits,
            claims: None,
            begin: Begin::WithLimits,
            open: None,
        }
    }

    /// Plans statements that take the row locks for these claims.
    pub(super) fn locking(limits: Limits, claims: &'a Claims) -> Self {
        Self {
            claims: Some(claims),
            ..Self::new(limits.locking(claims))
        }
    }

    /// Plans statements that begin with the admission of these claims.
    pub(super) fn admitting(limits: Limits, claims: &'a Claims) -> Self {
        Self {
            begin: Begin::ForAdmission,
            ..Self::locking(limits, claims)
        }
    }
}

/// Reason why the statements ended before their result.
pub(super) enum Halt {
    /// The transaction began before its request and cannot be used for it.
    TooEarly,
    /// A resource was last used on another timeline of the database.
    Behind,
    /// A token is stale.
    Stale(StaleToken),
    /// A statement failed.
    Failed(Failure),
}

impl From<Failure> for Halt {
    fn from(failure: Failure) -> Self {
        Self::Failed(failure)
    }
}

impl<DB: FenceDatabase> Fence<DB> {
    /// Runs statements in a transaction. Returns the open transaction and the result of the
    /// statements.
    pub(super) async fn open<T>(
        &self,
        mut plan: Plan<'_, DB>,
        statements: impl AsyncFnOnce(&mut Transaction<DB>) -> Result<T, Halt> + Clone,
    ) -> Result<(Transaction<DB>, T), AdmitError> {
        let mut tries = Tries::new(plan.limits);
        // The transaction of the next attempt, if it has already begun.
        let mut open = plan.open.take();
        loop {
            let limits = tries.limits();
            let mut transaction = match open.take() {
                Some(transaction) => transaction,
                None => self.begin_in_turn(limits, plan.begin).await?,
            };
            let began = Instant::now();
            if !self.connections.names.is_checked() {
                // The outer error is a timeout. The inner error, of the check itself, is not
                // retried.
                let check = transaction.run(async |on| Ok(ensure_checked::<DB>(on).await));
                check.await??;
            }
            let attempt = statements.clone();
            match attempt(&mut transaction).await {
                Ok(outcome) => {
                    transaction.held_since = Instant::now();
                    return Ok((transaction, outcome));
                }
                Err(Halt::Stale(stale)) => return Err(stale.into()),
                Err(Halt::TooEarly) => {
                    let mut limits = transaction.limits();
                    // An idempotency key has its own timeout.
                    if limits.key_timeout.is_none() {
                        limits.lock_timeout = limits.lock_timeout.saturating_sub(began.elapsed());
                    }
                    transaction.restart(limits).await?;
                    open = Some(transaction);
                }
                Err(Halt::Behind) => {
                    drop(transaction);
                    tries.count_catch_up()?;
                    if let Some(claims) = plan.claims {
                        self.catch_up(claims).await?;
                    }
                }
                Err(Halt::Failed(failure))
                    if transaction.began_early && failure.fault.is_gone() =>
                {
                    transaction.discard();
                    let tested = Transaction::begin_tested(&self.connections, limits, plan.begin);
                    open = Some(tested.await?);
                }
                Err(Halt::Failed(failure)) => {
                    drop(transaction);
                    tries.pause_after(failure).await?;
                }
            }
        }
    }

    /// Begins a transaction. If the database allows one writer at a time, first waits, without a
    /// connection, until no other transaction of this process writes.
    async fn begin_in_turn(
        &self,
        limits: Limits,
        begin: Begin,
    ) -> Result<Transaction<DB>, Failure> {
        let turn = match DB::HAS_SERVER || begin == Begin::ToRead {
            true => None,
            false => {
                let until = after(limits.lock_timeout);
                let turn = self.queues.wait(QueueKey::Writer, until).await;
                Some(turn.ok_or_else(Failure::in_use)?)
            }
        };
        let mut transaction = Transaction::begin(&self.connections, limits, begin).await?;
        transaction.turn = turn;
        Ok(transaction)
    }

    /// Runs statements of the fence in a transaction with these timeouts, and commits the
    /// transaction.
    pub(super) async fn in_transaction<T>(
        &self,
        limits: Limits,
        statements: impl AsyncFnOnce(On<'_, DB>) -> sqlx::Result<T> + Clone,
    ) -> Result<T, AdmitError> {
        let opened = self.open(Plan::new(limits), async move |transaction| {
            // The timeout of `write` includes the additional time of a long statement.
            Ok(match limits.is_long {
                true => transaction.write(statements).await?,
                false => transaction.run(statements).await?,
            })
        });
        let (transaction, outcome) = opened.await?;
        transaction.commit().await.map_err(AdmitError::at_commit)?;
        Ok(outcome)
    }

    /// Runs statements of the fence that only read, in a transaction that is rolled back.
    pub(super) async fn read<T>(
        &self,
        statements: impl AsyncFnOnce(On<'_, DB>) -> sqlx::Result<T> + Clone,
    ) -> Result<T, AdmitError> {
        let plan = Plan {
            begin: Begin::ToRead,
            ..Plan::new(self.limits)
        };
        let opened = self.open(plan, async move |transaction| {
            Ok(transaction.run(statements).await?)
        });
        let (_, outcome) = opened.await?;
        Ok(outcome)
    }

    /// Returns the names of the fence. If the fence has not been checked yet, opens a transaction
    /// for the check.
    pub(super) async fn checked_names(&self) -> Result<&Names, AdmitError> {
        let names = &self.connections.names;
        if !names.is_checked() {
            self.read(async |_| Ok(())).await?;
        }
        Ok(names)
    }

    /// Returns the timeouts of a transaction that, on a distributed fence, updates all rows of a
    /// worker.
    pub(super) async fn limits_on_workers(&self) -> Result<Limits, AdmitError> {
        Ok(match self.checked_names().await?.is_distributed() {
            true => self.limits.long(),
            false => self.limits,
        })
    }
}

/// Checks that the fence can be used, unless an earlier check has passed.
pub(super) async fn ensure_checked<DB: FenceDatabase>(on: On<'_, DB>) -> Result<(), Failure> {
    match on.names.is_checked() || DB::check(on).await? {
        true => Ok(()),
        false => Err(Failure::not_migrated()),
    }
}

/// Maximum number of times that the fence catches up for one request. The fence has to catch up a
/// second time only if the database fails over again, or if another session inserts the row in the
/// meantime.
const CATCH_UPS: usize = 2;

/// Upper bound of the first pause. The bound doubles with each further pause.
const FIRST_PAUSE: Duration = Duration::from_millis(2);

/// Upper bound of every pause.
const LONGEST_PAUSE: Duration = Duration::from_millis(100);

/// Attempts to run the statements of one request.
struct Tries {
    limits: Limits,
    /// The time at which the lock timeout passes.
    until: Instant,
    /// Whether an attempt has collided with another transaction.
    collided: bool,
    /// The upper bound of the next pause.
    pause: Duration,
    catch_ups: usize,
}

impl Tries {
    fn new(limits: Limits) -> Self {
        Self {
            limits,
            until: after(limits.lock_timeout),
            collided: false,
            pause: FIRST_PAUSE,
            catch_ups: 0,
        }
    }

    /// Returns the timeouts for the next attempt. After a collision, an attempt has only the rest
    /// of the lock timeout.
    fn limits(&self) -> Limits {
        let mut limits = self.limits;
        if self.collided {
            limits.lock_timeout = self.until.saturating_duration_since(Instant::now());
        }
        limits
    }

    /// Waits for a random pause before another attempt.
    ///
    /// # Errors
    ///
    /// Returns the failure if it is not a collision, or if the lock timeout would pass during the
    /// pause.
    async fn pause_after(&mut self, failure: Failure) -> Result<(), Failure> {
        let pause = self.pause.mul_f64(rand::random());
        if failure.fault != Fault::Collision || Instant::now() + pause >= self.until {
            return Err(failure);
        }
        tracing::debug!(
            error = Chain(&failure.cause).to_string(),
            "retrying after a collision with another transaction"
        );
        self.collided = true;
        self.pause = (self.pause * 2).min(LONGEST_PAUSE);
        sleep(pause).await;
        Ok(())
    }

    /// Counts an attempt after which the fence has to catch up. Returns an error if there were too
    /// many.
    fn count_catch_up(&mut self) -> Result<(), Failure> {
        self.catch_ups += 1;
        if self.catch_ups > CATCH_UPS {
            return Err(Failure::undecided());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    fn failure(fault: Fault) -> Failure {
        Failure {
            fault,
            cause: Arc::new(sqlx::Error::RowNotFound),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn conflicts_are_retried_with_pauses_until_the_lock_timeout() {
        let began = Instant::now();
        let mut tries = Tries::new(Limits::default());
        assert_eq!(tries.limits().lock_timeout, Limits::default().lock_timeout);
        let mut count = 0;
        while tries.pause_after(failure(Fault::Collision)).await.is_ok() {
            assert!(
                tries.limits().lock_timeout <= Limits::default().lock_timeout - began.elapsed()
            );
            count += 1;
        }
        assert!(began.elapsed() <= Limits::default().lock_timeout);
        assert!((40..1_000).contains(&count), "{count}");
        for fault in [Fault::Contention, Fault::Lost, Fault::Refused] {
            let mut tries = Tries::new(Limits::default());
            assert!(tries.pause_after(failure(fault)).await.is_err());
        }
    }

    #[test]
    fn catch_up_is_retried_a_bounded_number_of_times() {
        let mut tries = Tries::new(Limits::default());
        for _ in 0..CATCH_UPS {
            tries.count_catch_up().unwrap();
        }
        assert!(tries.count_catch_up().is_err());
    }
}
