//! What begins anew before anything was written for a handler.
//!
//! 1. A transaction that collided with another one (40001, or a deadlock) is over, and may succeed at once if it is
//!    repeated. On Postgres an admission meets that only in a deadlock; databases that lock and read in other ways
//!    answer so where Postgres would wait. So it is repeated, as long as it would wait for a row lock, with
//!    short pauses at random.
//! 2. Nothing is repeated that ran behind the admission: the hook at BEGIN, the handler, COMMIT. Only a single statement
//!    is, with its admission, since the fence knows all of it.
//! 3. After a failover of the database what is behind is brought up first, and then admitted.

use std::time::Duration;

use tokio::time::{Instant, sleep};

use crate::{
    chain::Chain,
    fence::{
        fault::{Failure, Fault},
        settings::{Limits, deadline},
    },
};

/// How often the fence catches up for one request: each time after the first means that the database has failed
/// over again, or that somebody else has made the row meanwhile.
const CATCH_UPS: usize = 2;

/// The first pause is at most so long, and each further one at most twice as long as the one before.
const FIRST_PAUSE: Duration = Duration::from_millis(2);

/// No pause is longer.
const LONGEST_PAUSE: Duration = Duration::from_millis(100);

/// The tries of one request.
pub(super) struct Tries {
    limits: Limits,
    began: Instant,
    until: Instant,
    pause: Duration,
    catch_ups: usize,
}

impl Tries {
    pub(super) fn new(limits: Limits) -> Self {
        Self {
            limits,
            began: Instant::now(),
            until: deadline(limits.lock_wait),
            pause: FIRST_PAUSE,
            catch_ups: 0,
        }
    }

    /// The limits of the next try: what is left of the wait for locks, once there was one.
    pub(super) fn limits(&self) -> Limits {
        if self.pause == FIRST_PAUSE {
            return self.limits;
        }
        let lock_wait = self.limits.lock_wait.saturating_sub(self.began.elapsed());
        Limits {
            lock_wait,
            ..self.limits
        }
    }

    /// Waits for a moment before another try.
    ///
    /// # Errors
    ///
    /// The failure itself, where it is no collision, or comes at the end of the wait for locks.
    pub(super) async fn after(&mut self, failure: Failure) -> Result<(), Failure> {
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
    pub(super) fn caught_up(&mut self) -> Result<(), Failure> {
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
        assert_eq!(tries.limits().lock_wait, Limits::default().lock_wait);
        let mut count = 0;
        while tries.after(failure(Fault::Collision)).await.is_ok() {
            assert!(tries.limits().lock_wait <= Limits::default().lock_wait - began.elapsed());
            count += 1;
        }
        assert!(began.elapsed() <= Limits::default().lock_wait);
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
