//! The state of a guard whose store answers late, fails, or grants less time than was requested.
//!
//! The store is in memory, so most of these tests use a paused clock, which a busy machine does not
//! affect.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use tokio::time::{Instant, sleep, timeout};
use tower_fence::{
    Resource,
    client::{AcquireError, Holder, HttpLeases, Loss},
    lease::{Acquire, Held, Lease, LeaseAdmin, LeaseError, LeaseId, Leases, MemoryLeases, Renew},
};

use crate::support::{
    epochs::InMemory,
    eventually,
    lease::{is_lost, is_unavailable, sku},
    soon,
};

/// A store that executes each request, and then delays or fails its answer as `mood` specifies.
#[derive(Clone)]
struct Moody {
    store: MemoryLeases,
    mood: Arc<Mood>,
}

#[derive(Default)]
struct Mood {
    acquire_late: Mutex<Duration>,
    /// Delays only renewals that keep their token.
    renew_late: Mutex<Duration>,
    release_late: Mutex<Duration>,
    release_fails: AtomicBool,
    /// The number of releases to execute without an answer.
    release_unanswered: AtomicU64,
    releases: AtomicU64,
    longest: Mutex<Option<Duration>>,
    acquires: AtomicU64,
    renewals: AtomicU64,
    /// The number of further requests for a new token that fail.
    new_tokens_fail: AtomicU64,
    /// Delays the answers to requests for a new token.
    new_token_late: Mutex<Duration>,
    /// The number of requests for a new token.
    new_tokens: AtomicU64,
    away: AtomicBool,
    /// Whether the first request is granted without an answer, and each further one is refused.
    is_crowded: AtomicBool,
    /// Whether requests for a lease go to an address at which nothing listens.
    is_misdirected: AtomicBool,
}

fn away<T>() -> Result<T, LeaseError> {
    let cause = std::io::Error::from(std::io::ErrorKind::ConnectionRefused);
    Err(LeaseError::Unavailable(Arc::new(cause)))
}

impl Moody {
    fn new() -> Self {
        Self {
            store: MemoryLeases::new(InMemory::default()),
            mood: Arc::default(),
        }
    }

    fn holder(&self, ttl_ms: u64) -> Holder<Self> {
        Holder::new(self.clone()).ttl(Duration::from_millis(ttl_ms))
    }

    fn renewals(&self) -> u64 {
        self.mood.renewals.load(Relaxed)
    }

    /// Waits until another renewal is sent.
    async fn next_renewal(&self) {
        let before = self.renewals();
        eventually!("a renewal is sent", self.renewals() > before);
    }

    async fn is_free_soon(&self) {
        soon!(
            "the lease is released",
            self.inspect(&sku()).await.unwrap().is_none()
        );
    }
}

fn of(setting: &Mutex<Duration>) -> Duration {
    *setting.lock().unwrap()
}

fn set(setting: &Mutex<Duration>, ms: u64) {
    *setting.lock().unwrap() = Duration::from_millis(ms);
}

impl Leases for Moody {
    async fn acquire(&self, resource: &Resource, request: Acquire) -> Result<Lease, LeaseError> {
        if self.mood.is_misdirected.load(Relaxed) {
            let nowhere = HttpLeases::new("http://127.0.0.1:1").unwrap();
            return nowhere.acquire(resource, request).await;
        }
        let earlier = self.mood.acquires.fetch_add(1, Relaxed);
        if self.mood.away.load(Relaxed) {
            return away();
        }
        let is_crowded = self.mood.is_crowded.load(Relaxed);
        if is_crowded && earlier > 0 {
            let resource = resource.clone();
            return Err(LeaseError::TooManyWaiters { resource });
        }
        let lease = self.store.acquire(resource, request).await;
        if is_crowded {
            return away();
        }
        sleep(of(&self.mood.acquire_late)).await;
        lease
    }

    async fn renew(
        &self,
        resource: &Resource,
        id: &LeaseId,
        mut request: Renew,
    ) -> Result<Lease, LeaseError> {
        self.mood.renewals.fetch_add(1, Relaxed);
        if self.mood.away.load(Relaxed) {
            return away();
        }
        if request.new_token {
            self.mood.new_tokens.fetch_add(1, Relaxed);
            let fails = &self.mood.new_tokens_fail;
            let fewer = fails.fetch_update(Relaxed, Relaxed, |left| left.checked_sub(1));
            if fewer.is_ok() {
                return away();
            }
        }
        if let Some(longest) = *self.mood.longest.lock().unwrap() {
            request.ttl = request.ttl.min(longest);
        }
        let late = match request.new_token {
            true => of(&self.mood.new_token_late),
            false => of(&self.mood.renew_late),
        };
        let lease = self.store.renew(resource, id, request).await;
        sleep(late).await;
        lease
    }

    async fn release(&self, resource: &Resource, id: &LeaseId) -> Result<(), LeaseError> {
        if self.mood.release_fails.load(Relaxed) {
            return away();
        }
        self.mood.releases.fetch_add(1, Relaxed);
        let released = self.store.release(resource, id).await;
        sleep(of(&self.mood.release_late)).await;
        let unanswered = &self.mood.release_unanswered;
        let fewer = unanswered.fetch_update(Relaxed, Relaxed, |left| left.checked_sub(1));
        if fewer.is_ok() { away() } else { released }
    }

    async fn inspect(&self, resource: &Resource) -> Result<Option<Held>, LeaseError> {
        self.store.inspect(resource).await
    }
}

#[tokio::test(start_paused = true)]
async fn lease_time_counts_from_before_the_request() {
    let store = Moody::new();
    set(&store.mood.acquire_late, 750);
    let lease = store.holder(2_700).acquire("sku-1").await.unwrap();
    let remaining = lease.remaining();
    assert!(remaining <= Duration::from_millis(1_950), "{remaining:?}");
    // After a renewal, the remaining time is also counted from the moment at which the request was
    // sent.
    set(&store.mood.renew_late, 600);
    let before = store.renewals();
    let most = AtomicU64::new(0);
    eventually("the lease was renewed twice", async || {
        // The remaining time is longest just after an answer.
        most.fetch_max(lease.remaining().as_millis() as u64, Relaxed);
        store.renewals() >= before + 3
    })
    .await;
    assert!(most.load(Relaxed) <= 2_100, "{most:?}");
    lease.check().unwrap();
}

#[tokio::test(start_paused = true)]
async fn lease_whose_answer_was_lost_is_released_after_a_refusal() {
    let store = Moody::new();
    store.mood.is_crowded.store(true, Relaxed);
    let holder = store.holder(60_000).wait(Duration::from_secs(1));
    let refused = holder.acquire("sku-1").await.err();
    assert_matches!(
        refused,
        Some(AcquireError::Lease(LeaseError::TooManyWaiters { .. }))
    );
    store.is_free_soon().await;
}

#[tokio::test]
async fn request_that_was_not_sent_causes_no_release() {
    let store = Moody::new();
    store.mood.is_misdirected.store(true, Relaxed);
    let refused = store.holder(60_000).acquire("sku-1").await.err();
    assert_matches!(
        refused,
        Some(AcquireError::Lease(LeaseError::Unavailable(_)))
    );
    // A release would run in the background.
    sleep(Duration::from_millis(100)).await;
    assert_eq!(store.mood.releases.load(Relaxed), 0);
}

#[tokio::test(start_paused = true)]
async fn no_renewal_outlives_its_guard() {
    let store = Moody::new();
    store.mood.release_fails.store(true, Relaxed);
    for end in 0..3 {
        let lease = store.holder(300).acquire("sku-1").await.unwrap();
        store.next_renewal().await;
        match end {
            0 => drop(lease),
            1 => is_unavailable(lease.release().await),
            _ => {
                _ = lease.run(async { drop(lease.lost()) }).await;
                drop(lease);
            }
        }
        // One renewal may be in progress.
        sleep(Duration::from_millis(20)).await;
        let after = store.renewals();
        sleep(Duration::from_millis(500)).await;
        assert_eq!(store.renewals(), after, "the renewals continue");
        let held = store.inspect(&sku()).await.unwrap();
        assert_eq!(held, None);
    }
}

#[tokio::test(start_paused = true)]
async fn slow_answer_does_not_restore_an_older_token() {
    let store = Moody::new();
    let lease = store.holder(2_700).acquire("sku-1").await.unwrap();
    set(&store.mood.renew_late, 750);
    store.next_renewal().await;
    let newest = lease.renew_with_new_token().await.unwrap().token;
    sleep(Duration::from_millis(1_200)).await;
    assert_eq!(lease.token(), newest);
    lease.check().unwrap();
}

/// The store shortens the lease, so the lease expires earlier than the slow answer states.
#[tokio::test(start_paused = true)]
async fn slow_answer_does_not_extend_a_shortened_lease() {
    let store = Moody::new();
    let lease = store.holder(900).acquire("sku-1").await.unwrap();
    set(&store.mood.renew_late, 250);
    store.next_renewal().await;
    *store.mood.longest.lock().unwrap() = Some(Duration::from_millis(400));
    lease.renew_with_new_token().await.unwrap();
    store.mood.away.store(true, Relaxed);
    sleep(Duration::from_millis(270)).await;
    assert!(lease.remaining() <= Duration::from_millis(130));
}

#[tokio::test(start_paused = true)]
async fn slow_answers_keep_the_lease() {
    let kept = async |delay_ms| {
        let store = Moody::new();
        let lease = store.holder(3_600).acquire("sku-1").await.unwrap();
        set(&store.mood.renew_late, delay_ms);
        sleep(Duration::from_millis(9_000)).await;
        lease.check().unwrap();
        lease.release().await.unwrap();
    };
    // The delay is more than a third of the TTL, so the next request is sent before the answer
    // arrives. With the second delay, the lease is kept only if no request is dropped.
    tokio::join!(kept(1_500), kept(2_000));
}

/// The process is paused until its lease has expired. When it resumes, the answer to a renewal has
/// already arrived.
#[tokio::test]
async fn loss_is_permanent() {
    let store = Moody::new();
    let lease = store.holder(300).acquire("sku-1").await.unwrap();
    set(&store.mood.renew_late, 100);
    store.next_renewal().await;
    std::thread::sleep(Duration::from_millis(320));
    let first = lease.check().unwrap_err();
    assert_matches!(first, Loss::Expired { .. });
    for _ in 0..10 {
        sleep(Duration::from_millis(10)).await;
        lease.check().unwrap_err();
        assert!(lease.remaining().is_zero());
        lease.run(async {}).await.unwrap_err();
    }
    assert!(matches!(lease.lost().await, Loss::Expired { .. }));
}

#[tokio::test(start_paused = true)]
async fn shorter_ttl_of_the_store_is_respected() {
    let store = Moody::new();
    let lease = store.holder(3_000).acquire("sku-1").await.unwrap();
    *store.mood.longest.lock().unwrap() = Some(Duration::from_millis(900));
    store.next_renewal().await;
    store.next_renewal().await;
    let began = Instant::now();
    while began.elapsed() < Duration::from_millis(2_000) {
        lease.check().unwrap();
        assert!(lease.remaining() <= Duration::from_millis(900));
        sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn unavailable_store_is_retried_until_the_wait_timeout() {
    let store = Moody::new();
    store.mood.away.store(true, Relaxed);
    let wait = Duration::from_millis(700);
    let began = Instant::now();
    let refused = store.holder(30_000).wait(wait).acquire("sku-1").await;
    assert_matches!(
        refused.err(),
        Some(AcquireError::Lease(LeaseError::Unavailable(_)))
    );
    let (took, most) = (began.elapsed(), wait + Duration::from_millis(10));
    assert!((wait..most).contains(&took), "{took:?}");
    assert!(store.mood.acquires.load(Relaxed) > 2);
}

#[tokio::test(start_paused = true)]
async fn loss_is_reported_before_the_release_completes() {
    let store = Moody::new();
    set(&store.mood.release_late, 60_000);
    let lease = store.holder(30_000).acquire("sku-1").await.unwrap();
    let lost = lease.lost();
    let releasing = tokio::spawn(lease.release());
    let loss = timeout(Duration::from_secs(2), lost).await;
    assert_matches!(loss, Ok(Loss::GivenUp { .. }));
    releasing.abort();
}

#[tokio::test(start_paused = true)]
async fn release_executed_twice_is_not_a_loss() {
    let store = Moody::new();
    let lease = store.holder(30_000).acquire("sku-1").await.unwrap();
    store.mood.release_unanswered.store(2, Relaxed);
    lease.release().await.unwrap();
    assert_eq!(store.mood.releases.load(Relaxed), 3);
    // If another client has broken the lease before the release, the lease is reported as lost.
    let lease = store.holder(30_000).acquire("sku-1").await.unwrap();
    store.store.break_lease(&sku(), None).await.unwrap();
    is_lost(lease.release().await);
}

#[tokio::test(start_paused = true)]
async fn a_release_is_retried_until_the_lease_must_have_expired() {
    let store = Moody::new();
    store.mood.release_fails.store(true, Relaxed);
    let lease = store.holder(30_000).acquire("sku-1").await.unwrap();
    let releasing = tokio::spawn(lease.release());
    sleep(Duration::from_millis(200)).await;
    store.mood.release_fails.store(false, Relaxed);
    releasing.await.unwrap().unwrap();
    assert!(store.inspect(&sku()).await.unwrap().is_none());

    // A dropped guard retries its release, too.
    store.mood.release_fails.store(true, Relaxed);
    drop(store.holder(30_000).acquire("sku-1").await.unwrap());
    sleep(Duration::from_millis(200)).await;
    store.mood.release_fails.store(false, Relaxed);
    store.is_free_soon().await;

    store.mood.release_fails.store(true, Relaxed);
    let lease = store.holder(500).acquire("sku-1").await.unwrap();
    let began = Instant::now();
    let released = timeout(Duration::from_secs(10), lease.release()).await;
    let released = released.expect("the release is retried forever");
    assert!(began.elapsed() >= Duration::from_millis(500));
    is_unavailable(released);
}

/// The store has executed renewals without an answer, so the lease lasts longer in the store than
/// the guard knows.
#[tokio::test(start_paused = true)]
async fn release_is_retried_after_renewals_without_an_answer() {
    let store = Moody::new();
    set(&store.mood.renew_late, 60_000);
    let ttl = Duration::from_secs(2);
    let lease = store.holder(2_000).acquire("sku-1").await.unwrap();
    let acquired_at = Instant::now();
    eventually!("two renewals are sent", store.renewals() >= 2);
    store.mood.release_fails.store(true, Relaxed);
    let releasing = tokio::spawn(lease.release());
    sleep(ttl.saturating_sub(acquired_at.elapsed()) + ttl / 10).await;
    store.mood.release_fails.store(false, Relaxed);
    releasing.await.unwrap().unwrap();
}

#[tokio::test]
async fn guard_may_be_dropped_outside_a_runtime() {
    thread_local! {
        static KEPT: std::cell::RefCell<Option<Box<dyn std::any::Any>>> = const { std::cell::RefCell::new(None) };
    }
    let store = Moody::new();
    let lease = store.holder(30_000).acquire("sku-1").await.unwrap();
    let keep = move || KEPT.with(|kept| *kept.borrow_mut() = Some(Box::new(lease)));
    std::thread::spawn(keep).join().unwrap();
    store.is_free_soon().await;

    // The runtime of the guard has shut down, and another one is running.
    let holder = store.holder(30_000);
    let lease = std::thread::spawn(move || {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        runtime.block_on(holder.acquire("sku-1")).unwrap()
    });
    drop(lease.join().unwrap());
    store.is_free_soon().await;
}

/// While the new token is requested, the lease is renewed as usual.
#[tokio::test(start_paused = true)]
async fn new_token_is_requested_repeatedly_for_one_ttl() {
    let store = Moody::new();
    let lease = store.holder(1_500).acquire("sku-1").await.unwrap();
    let first = lease.token();
    store.mood.new_tokens_fail.store(3, Relaxed);
    let second = lease.renew_with_new_token().await.unwrap();
    assert!(second.token > first);
    assert_eq!(store.mood.new_tokens.load(Relaxed), 4);

    store.mood.new_tokens_fail.store(u64::MAX, Relaxed);
    let limit = Duration::from_secs(10);
    let refused = timeout(limit, lease.renew_with_new_token()).await;
    is_unavailable(refused.expect("the renewal does not end"));
    // There are pauses between the requests.
    let requests = store.mood.new_tokens.load(Relaxed);
    assert!((6..500).contains(&requests), "{requests}");
    assert_eq!((lease.token(), lease.check().is_ok()), (second.token, true));

    // The store executes the request, but does not answer.
    store.mood.new_tokens_fail.store(0, Relaxed);
    set(&store.mood.new_token_late, 60_000);
    let refused = timeout(limit, lease.renew_with_new_token()).await;
    is_unavailable(refused.expect("the renewal does not end"));
    soon!(
        "a renewal shows the new token",
        lease.token() > second.token && lease.check().is_ok()
    );
}

/// The failing store answers immediately. The silent store never answers.
#[tokio::test(start_paused = true)]
async fn failing_or_silent_store_is_retried_with_pauses() {
    for (is_silent, most) in [(false, 500), (true, 3)] {
        let store = Moody::new();
        let lease = store.holder(1_500).acquire("sku-1").await.unwrap();
        if is_silent {
            set(&store.mood.renew_late, 60_000);
        } else {
            store.mood.away.store(true, Relaxed);
        }
        let loss = timeout(Duration::from_secs(20), lease.lost()).await;
        assert_matches!(loss, Ok(Loss::Expired { .. }));
        let requests = store.renewals();
        assert!(requests <= most, "silent: {is_silent}, {requests} requests");
    }
}

#[tokio::test(start_paused = true)]
async fn immediate_answer_needs_no_renewal() {
    let store = Moody::new();
    let lease = store.holder(60_000).acquire("sku-1").await.unwrap();
    assert_eq!(store.renewals(), 0);
    let token = lease.token();
    let expected =
        format!("LeaseGuard {{ resource: Resource(\"sku-1\"), token: {token:?}, lost: None, .. }}");
    assert_eq!(format!("{lease:?}"), expected);
}

#[tokio::test(start_paused = true)]
async fn holder_without_wait_sends_one_request() {
    let store = Moody::new();
    let holder = store.holder(60_000);
    let _lease = holder.acquire("sku-1").await.unwrap();
    holder.acquire("sku-1").await.unwrap_err();
    assert_eq!(store.mood.acquires.load(Relaxed), 2);
}

/// A late answer to the acquisition is followed by a renewal, which reports how long the lease
/// lasts.
#[tokio::test(start_paused = true)]
async fn lease_that_expired_during_its_request_is_not_returned() {
    let store = Moody::new();
    for (acquire_late, renew_late, is_returned) in
        [(1_000, 0, true), (4_800, 0, false), (1_000, 2_500, false)]
    {
        set(&store.mood.acquire_late, acquire_late);
        set(&store.mood.renew_late, renew_late);
        let before = store.renewals();
        let acquired = store.holder(2_400).acquire("sku-1").await;
        assert!(
            store.renewals() > before,
            "no renewal asked for the remaining time"
        );
        match is_returned {
            true => acquired.unwrap().release().await.unwrap(),
            false => assert_matches!(
                acquired,
                Err(AcquireError::Lease(LeaseError::Unavailable(_)))
            ),
        }
    }
}
