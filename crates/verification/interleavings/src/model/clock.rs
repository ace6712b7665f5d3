//! A clock that advances whenever the scheduler runs its task. At any step, the next timers may
//! expire. Occasionally, later timers expire at the same time, as after a pause of the process.
//!
//! A timer of a day or more never expires. If a task waits only for such a timer, it waits forever,
//! which is a deadlock.

use std::{
    cell::RefCell,
    collections::BTreeMap,
    future::poll_fn,
    mem,
    ops::{Add, Sub},
    pin::Pin,
    task::{Context, Poll, Waker},
    time::Duration,
};

use shuttle::{
    future::yield_now,
    rand::{Rng, thread_rng},
};

use super::step;

const NEVER: Duration = Duration::from_secs(24 * 60 * 60);

#[derive(Default)]
struct Clock {
    now: Duration,
    timers: BTreeMap<(Duration, u64), Waker>,
    count: u64,
    /// The task that advances the clock.
    passing: Option<Waker>,
    stopped: bool,
    is_steady: bool,
}

thread_local! {
    static CLOCK: RefCell<Clock> = RefCell::default();
}

fn with<T>(f: impl FnOnce(&mut Clock) -> T) -> T {
    CLOCK.with(|clock| f(&mut clock.borrow_mut()))
}

/// Starts a new execution at time zero.
pub fn reset() {
    let before = with(mem::take);
    drop(before);
}

/// Excludes pauses of the process from this execution.
pub fn never_stands_still() {
    with(|clock| clock.is_steady = true);
}

/// Advances the clock until it is stopped.
pub async fn pass() {
    while wait_for_timer().await {
        for waker in with(Clock::advance) {
            waker.wake();
        }
        // The yield lets other tasks run first. The step also allows this task to continue.
        if thread_rng().gen_bool(0.5) {
            yield_now().await;
        } else {
            step();
        }
    }
}

pub fn stop() {
    let passing = with(|clock| {
        clock.stopped = true;
        clock.passing.take()
    });
    passing.into_iter().for_each(Waker::wake);
}

async fn wait_for_timer() -> bool {
    poll_fn(|context| {
        with(|clock| {
            if clock.stopped {
                return Poll::Ready(false);
            }
            let first = clock.timers.first_key_value();
            if first.is_some_and(|((end, _), _)| *end < NEVER) {
                return Poll::Ready(true);
            }
            clock.passing = Some(context.waker().clone());
            Poll::Pending
        })
    })
    .await
}

impl Clock {
    /// Advances to the next timer, or to a later timer.
    fn advance(&mut self) -> Vec<Waker> {
        let ends: Vec<Duration> = self.timers.keys().map(|(end, _)| *end).collect();
        let ends: Vec<Duration> = ends.into_iter().filter(|end| *end < NEVER).collect();
        let mut rng = thread_rng();
        let which = match !self.is_steady && rng.gen_bool(0.1) {
            true => rng.gen_range(0..ends.len()),
            false => 0,
        };
        self.now = self.now.max(ends[which]);
        let later = self.timers.split_off(&(self.now, u64::MAX));
        mem::replace(&mut self.timers, later)
            .into_values()
            .collect()
    }
}

/// An instant, like that of tokio.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Instant(Duration);

impl Instant {
    pub fn now() -> Self {
        Self(with(|clock| clock.now))
    }

    pub fn since_beginning() -> Duration {
        Self::now().0
    }

    pub fn elapsed(self) -> Duration {
        Self::now() - self
    }

    pub fn checked_add(self, time: Duration) -> Option<Self> {
        self.0.checked_add(time).map(Self)
    }

    pub fn saturating_duration_since(self, earlier: Self) -> Duration {
        self.0.saturating_sub(earlier.0)
    }
}

impl Add<Duration> for Instant {
    type Output = Self;

    fn add(self, time: Duration) -> Self {
        Self(self.0 + time)
    }
}

impl Sub for Instant {
    type Output = Duration;

    fn sub(self, earlier: Self) -> Duration {
        self.saturating_duration_since(earlier)
    }
}

#[derive(Debug)]
pub struct Sleep {
    end: Instant,
    timer: Option<(Duration, u64)>,
}

pub fn sleep_until(end: Instant) -> Sleep {
    Sleep { end, timer: None }
}

pub fn sleep(time: Duration) -> Sleep {
    sleep_until(Instant::now() + time)
}

impl Sleep {
    fn disarm(&mut self) {
        if let Some(timer) = self.timer.take() {
            let waker = with(|clock| clock.timers.remove(&timer));
            drop(waker);
        }
    }
}

impl Future for Sleep {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        self.disarm();
        if self.end <= Instant::now() {
            return Poll::Ready(());
        }
        let (timer, passing) = with(|clock| {
            clock.count += 1;
            let timer = (self.end.0, clock.count);
            clock.timers.insert(timer, context.waker().clone());
            (timer, clock.passing.take())
        });
        self.timer = Some(timer);
        passing.into_iter().for_each(Waker::wake);
        Poll::Pending
    }
}

impl Drop for Sleep {
    fn drop(&mut self) {
        self.disarm();
    }
}
