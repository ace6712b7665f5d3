//! The one way in which the fence uses a transaction: begin it, run statements, and repeat both if
//! that may help.
//!
//! 1. A transaction that collides with another one (a deadlock, a serialization failure) has had no
//!    effect. It begins anew after a random pause, until the lock timeout is over.
//! 2. If a resource was last used on another timeline of the database, the fence catches up with the
//!    failover first.
//! 3. A transaction that began before its request saves a round trip. If it does not serve, since a token
//!    is not admitted or the resource was written to meanwhile, the statements run again in a
//!    transaction that begins now, which finds out why a token is refused.
//! 4. If the connection of such a transaction was closed since it was used last, another one is tested
//!    first, and taken.

use std::time::Duration;

use tokio::time::{Instant, sleep};

use crate::{
    chain::Chain,
    fence::{
        Fence,
        claims::Claims,
        error::AdmitError,
        fault::{Failure, Fault},
        settings::{Limits, deadline},
        sql::{Begin, FenceDatabase, Names},
        tx::Transaction,
    },
};

/// What a transaction is for.
pub(super) struct Plan<'a, DB: FenceDatabase> {
    limits: Limits,
    /// The resources, to catch up with a failover.
    claims: Option<&'a Claims>,
    /// The timeout of the wait for an idempotency key.
    key_timeout: Option<Duration>,
    /// Whether the first statement is an admission, which sets the limits of the transaction.
    admits: bool,
    /// A transaction that is open already, for the first attempt.
    open: Option<Transaction<DB>>,
}

impl<'a, DB: FenceDatabase> Plan<'a, DB> {
    /// Statements without an admission.
    pub(super) const fn new(limits: Limits) -> Self {
        Self {
            limits,
            claims: None,
            key_timeout: None,
            admits: false,
            open: None,
        }
    }

    /// Statements that take the row locks of these resources.
    pub(super) fn locking(limits: Limits, claims: &'a Claims) -> Self {
        Self {
            claims: Some(claims),
            ..Self::new(limits.locking(claims))
        }
    }

    /// Statements that begin with the admission of these.
    pub(super) fn admitting(limits: Limits, claims: &'a Claims) -> Self {
        Self {
            admits: true,
            ..Self::locking(limits, claims)
        }
    }

    /// The same, with the claim of an idempotency key before the admission.
    pub(super) fn under_key(self, timeout: Duration) -> Self {
        Self {
            key_timeout: Some(timeout),
            ..self
        }
    }

    /// The same, at first in a transaction that is open already.
    pub(super) fn on(self, transaction: Transaction<DB>) -> Self {
        Self {
            open: Some(transaction),
            ..self
        }
    }

    const fn begin(&self, limits: Limits) -> Begin {
        let limits = limits.transaction(self.key_timeout);
        match self.admits {
            true => Begin::ForAdmission(limits),
            false => Begin::WithLimits(limits),
        }
    }
}

/// What statements have come to.
pub(super) enum Step<T> {
    Done(T),
    /// The transaction began before its request, and does not serve it.
    TooEarly,
    /// A resource was last used on another timeline of the database.
    Behind,
}

impl<DB: FenceDatabase> Fence<DB> {
    /// Runs statements in a transaction. Returns it, still open, with what they have returned.
    pub(super) async fn open<T>(
        &self,
        mut plan: Plan<'_, DB>,
        statements: impl AsyncFnOnce(&mut Transaction<DB>, &Names) -> Result<Step<T>, Failure> + Clone,
    ) -> Result<(Transaction<DB>, T), AdmitError> {
        let mut tries = Tries::new(plan.limits);
        let mut open = plan.open.take();
        loop {
            let limits = tries.limits();
            let mut transaction = match open.take() {
                Some(transaction) => transaction,
                None => Transaction::begin(&self.connections, limits, plan.begin(limits)).await?,
            };
            let began = Instant::now();
            let names = self.names(&mut transaction).await?;
            let attempt = statements.clone();
            match attempt(&mut transaction, &names).await {
                Ok(Step::Done(outcome)) => {
                    transaction.held_since = Instant::now();
                    return Ok((transaction, outcome));
                }
                Ok(Step::TooEarly) => {
                    transaction.restart_after(began.elapsed()).await?;
                    open = Some(transaction);
                }
                Ok(Step::Behind) => {
                    drop(transaction);
                    tries.caught_up()?;
                    if let Some(claims) = plan.claims {
                        // On the heap: it opens a transaction in this very way.
                        Box::pin(self.catch_up(claims)).await?;
                    }
                }
                Err(failure) if transaction.began_early && failure.fault.is_gone() => {
                    transaction.discard();
                    let begin = plan.begin(limits);
                    open = Some(Transaction::begin_tested(&self.connections, limits, begin).await?);
                }
                Err(failure) => {
                    drop(transaction);
                    tries.after(failure).await?;
                }
            }
        }
    }

    /// Runs statements of the fence alone in a transaction, and commits it.
    pub(super) async fn in_transaction<T>(
        &self,
        statements: impl AsyncFnOnce(&mut DB::Connection, &Names) -> sqlx::Result<T> + Clone,
    ) -> Result<T, AdmitError> {
        let (transaction, outcome) = self.open_for(statements).await?;
        transaction.commit().await?;
        Ok(outcome)
    }

    /// Runs statements of the fence that only read.
    pub(super) async fn read<T>(
        &self,
        statements: impl AsyncFnOnce(&mut DB::Connection, &Names) -> sqlx::Result<T> + Clone,
    ) -> Result<T, AdmitError> {
        let (_, outcome) = self.open_for(statements).await?;
        Ok(outcome)
    }

    async fn open_for<T>(
        &self,
        statements: impl AsyncFnOnce(&mut DB::Connection, &Names) -> sqlx::Result<T> + Clone,
    ) -> Result<(Transaction<DB>, T), AdmitError> {
        let plan = Plan::new(self.limits);
        self.open(plan, async move |transaction, names| {
            let outcome = transaction.run(async |conn| statements(conn, names).await);
            Ok(Step::Done(outcome.await?))
        })
        .await
    }
}

/// How often the fence catches up for one request: each time after the first means that the database has failed
/// over again, or that somebody else has made the row meanwhile.
const CATCH_UPS: usize = 2;

/// The first pause is at most so long, and each further one at most twice as long as the one before.
const FIRST_PAUSE: Duration = Duration::from_millis(2);

/// No pause is longer.
const LONGEST_PAUSE: Duration = Duration::from_millis(100);

/// The tries of one request.
struct Tries {
    limits: Limits,
    began: Instant,
    until: Instant,
    pause: Duration,
    catch_ups: usize,
}

impl Tries {
    fn new(limits: Limits) -> Self {
        Self {
            limits,
            began: Instant::now(),
            until: deadline(limits.lock_timeout),
            pause: FIRST_PAUSE,
            catch_ups: 0,
        }
    }

    /// The limits of the next try: what is left of the wait for locks, once there was one.
    fn limits(&self) -> Limits {
        if self.pause == FIRST_PAUSE {
            return self.limits;
        }
        let lock_timeout = self
            .limits
            .lock_timeout
            .saturating_sub(self.began.elapsed());
        Limits {
            lock_timeout,
            ..self.limits
        }
    }

    /// Waits for a moment before another try.
    ///
    /// # Errors
    ///
    /// The failure itself, where it is no collision, or comes at the end of the wait for locks.
    async fn after(&mut self, failure: Failure) -> Result<(), Failure> {
        let pause = self.pause.mul_f64(rand::random());
        if failure.fault != Fault::Collision || Instant::now() + pause >= self.until {
            return Err(failure);
        }
        tracing::debug!(error = %Chain(&failure.cause), "another transaction went first: once more");
        self.pause = (self.pause * 2).min(LONGEST_PAUSE);
        sleep(pause).await;
        Ok(())
    }

    /// Counts that the fence had to catch up first.
    fn caught_up(&mut self) -> Result<(), Failure> {
        self.catch_ups += 1;
        if self.catch_ups > CATCH_UPS {
            return Err(Failure::in_use());
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
    async fn collisions_are_repeated_with_pauses_until_the_wait_for_locks_is_over() {
        let began = Instant::now();
        let mut tries = Tries::new(Limits::default());
        assert_eq!(tries.limits().lock_timeout, Limits::default().lock_timeout);
        let mut count = 0;
        while tries.after(failure(Fault::Collision)).await.is_ok() {
            assert!(
                tries.limits().lock_timeout <= Limits::default().lock_timeout - began.elapsed()
            );
            count += 1;
        }
        assert!(began.elapsed() <= Limits::default().lock_timeout);
        assert!((40..1_000).contains(&count), "{count}");
        for fault in [Fault::Contention, Fault::Lost, Fault::Refused] {
            let mut tries = Tries::new(Limits::default());
            assert!(tries.after(failure(fault)).await.is_err());
        }
    }

    #[test]
    fn catching_up_is_repeated_a_bounded_number_of_times() {
        let mut tries = Tries::new(Limits::default());
        for _ in 0..CATCH_UPS {
            tries.caught_up().unwrap();
        }
        assert!(tries.caught_up().is_err());
    }
}
