//! The holder: how it acquires its lease, and the tokens that it sends with requests.

use std::{
    convert::Infallible,
    future::{Ready, ready},
    task::{Context, Poll},
    time::Duration,
};

use http::{Request, StatusCode};
use serde_json::{Value, json};
use sqlx::Sqlite;
use tokio::time::{Instant, sleep, timeout};
use tower::{Service, ServiceBuilder, ServiceExt};
use tower_fence::{
    client::{AcquireError, Holder, HttpLeases, Loss, WithLeaseError},
    issuer::Issuer,
    lease::{Acquire, LeaseAdmin, LeaseError, Leases, MemoryLeases, Owner},
};

use super::issued::Issued;
use crate::support::{
    clock::StoppedClock,
    database::{Fresh, TestDatabase},
    epochs::InMemory,
    eventually,
    fence::resource,
    http::Server,
    lease::{is_lost, sku, waiters},
    proxy::Link,
    soon,
};

#[tokio::test]
async fn next_write_carries_the_new_token() {
    let issued = Issued::start().await;
    let lease = issued.holder(30_000).acquire("sku-1").await.unwrap();
    let first = lease.token();
    let second = lease.renew_with_new_token().await.unwrap().token;
    assert!(second > first);
    assert_eq!(lease.token(), second);
    let expected = format!("{second};resource=\"sku-1\"");
    assert_eq!(lease.headers()["fencing-token"], expected);

    let echo = tower::service_fn(async |request: Request<()>| {
        let mut values = request.headers().get_all("fencing-token").into_iter();
        let value = values.next().cloned();
        assert!(values.next().is_none());
        Ok::<_, std::convert::Infallible>(value)
    });
    let client = ServiceBuilder::new().layer(lease.layer()).service(echo);
    let request = Request::get("/").header("Fencing-Token", "1");
    let sent = client.clone().oneshot(request.body(()).unwrap());
    assert_eq!(sent.await.unwrap().unwrap(), expected);
    let third = lease.renew_with_new_token().await.unwrap().token;
    let sent = client.oneshot(Request::get("/").body(()).unwrap());
    let expected = format!("{third};resource=\"sku-1\"");
    assert_eq!(sent.await.unwrap().unwrap(), expected);

    issued.store.break_lease(&sku(), None).await.unwrap();
    is_lost(lease.renew_with_new_token().await);
    assert!(matches!(lease.check(), Err(Loss::Refused { .. })));
}

#[tokio::test]
async fn any_duration_is_accepted() {
    let db = Sqlite::fresh(2).await;
    let leases = MemoryLeases::new(db.fence());
    let holder = Holder::new(leases.clone());
    let holder = holder.ttl(Duration::MAX).wait(Duration::MAX);
    let lease = holder.acquire("sku-1").await.unwrap();
    leases.inspect(lease.resource()).await.unwrap().unwrap();
    let request = Acquire::new(Duration::MAX).lock_delay(Duration::MAX);
    leases.acquire(&resource("sku-2"), request).await.unwrap();
    let first = lease.token();
    assert!(lease.renew_with_new_token().await.unwrap().token > first);
    lease.release().await.unwrap();
}

#[tokio::test]
async fn empty_owner_is_ignored() {
    let db = Sqlite::fresh(2).await;
    let leases = MemoryLeases::new(db.fence());
    let holder = Holder::new(leases.clone()).owner(Owner::new("").unwrap());
    let _lease = holder.acquire("sku-1").await.unwrap();
    assert_eq!(leases.inspect(&sku()).await.unwrap().unwrap().owner, None);
}

#[tokio::test]
async fn superseded_token_is_a_loss_and_used_token_is_not() {
    let issued = Issued::start().await;
    let lease = issued.holder(30_000).acquire("sku-1").await.unwrap();
    let problem = |presented: i64, members: Value| {
        let mut problem = json!({
            "type": "https://docs.rs/tower-fence/latest/tower_fence/problem/#stale-token",
            "resource": "sku-1",
            "presented_token": presented,
            "max_token": presented + 1,
        });
        let all = problem.as_object_mut().unwrap();
        all.extend(members.as_object().unwrap().clone());
        problem.to_string()
    };
    let refused = StatusCode::PRECONDITION_FAILED;
    let own = lease.token().get();
    let superseded = problem(own, json!({}));
    for (status, body) in [
        (
            refused,
            problem(own, json!({ "max_token": own, "used": true })),
        ),
        (refused, problem(own, json!({ "resource": "sku-2" }))),
        (refused, problem(own, json!({ "by_floor": true }))),
        (refused, "something else".into()),
        (StatusCode::OK, superseded.clone()),
    ] {
        lease.observe(status, body.as_bytes()).unwrap();
    }
    let lost = lease.lost();
    let loss = lease.observe(refused, superseded.as_bytes());
    assert_matches!(loss, Err(Loss::Superseded(_)));
    assert!(matches!(lost.await, Loss::Superseded(stale) if stale.max_token == own + 1));
    assert!(lease.run(async {}).await.is_err());

    // Another client has used the next token, as a reusable one.
    let lease = issued.holder(30_000).acquire("sku-2").await.unwrap();
    let own = lease.token().get();
    let refusal = problem(own, json!({ "resource": "sku-2", "max_token": own }));
    let loss = lease.observe(refused, refusal.as_bytes());
    assert_matches!(loss, Err(Loss::Superseded(_)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn holder_retries_until_its_wait_timeout() {
    let issued = Issued::start().await;
    issued.proxy.set(Link::Cut);
    let waiting = issued.holder(30_000).wait(Duration::from_secs(20));
    let waiting = tokio::spawn(async move { waiting.acquire("sku-1").await });
    sleep(Duration::from_millis(500)).await;
    issued.proxy.set(Link::Whole);
    let lease = timeout(Duration::from_secs(5), waiting).await.unwrap();
    lease.unwrap().unwrap().check().unwrap();

    let invalid = issued.holder(1).wait(Duration::from_secs(20));
    let invalid = timeout(Duration::from_secs(5), invalid.acquire("sku-1")).await;
    let invalid = invalid.expect("the holder retries an invalid request");
    assert_matches!(
        invalid,
        Err(AcquireError::Lease(LeaseError::Invalid { field, .. })) if field == "ttl_ms"
    );
    let unnamed = issued.holder(30_000).acquire("").await;
    assert_matches!(unnamed, Err(AcquireError::Resource(_)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn grant_with_a_lost_answer_is_found_again() {
    let issued = Issued::start().await;
    let before = issued.holder(30_000).acquire("sku-1").await.unwrap();
    let token = before.token().get();
    before.release().await.unwrap();
    let waiting = issued.holder(30_000).wait(Duration::from_secs(20));
    issued.proxy.set(Link::NoAnswer);
    let asking = tokio::spawn(async move { waiting.acquire("sku-1").await });
    eventually!("the lease is granted", issued.is_held().await);
    issued.proxy.set(Link::Whole);
    let lease = asking.await.unwrap().unwrap();
    // The lease was granted once.
    assert_eq!(lease.token().get(), token + 1);
    lease.release().await.unwrap();

    // If the client does not retry, the lease is released.
    issued.proxy.set(Link::NoAnswer);
    issued.holder(60_000).acquire("sku-1").await.unwrap_err();
    issued.proxy.set(Link::Whole);
    issued.is_free_soon().await;
}

#[tokio::test]
async fn lease_after_a_long_wait_has_its_full_ttl() {
    let (issued, clock) = (Issued::start().await, StoppedClock::stop());
    let ttl = Duration::from_millis(900);
    let first = Acquire::new(Duration::from_secs(60));
    let first = issued.store.acquire(&sku(), first).await.unwrap();
    let waiting = issued.holder(900).wait(Duration::from_secs(20));
    let owner = Owner::new("worker-7").unwrap();
    let waiting = tokio::spawn(async move { waiting.owner(owner).acquire("sku-1").await });
    let is_waiting = async || waiters(&issued.store).await == 1;
    clock.until("the request waits", is_waiting).await;
    clock.advance(2 * ttl).await;
    issued.store.release(&sku(), &first.id).await.unwrap();
    let lease = waiting.await.unwrap().unwrap();
    assert!(lease.remaining() > ttl / 2, "{:?}", lease.remaining());
    let held = issued.store.inspect(&sku()).await.unwrap().unwrap();
    assert_eq!(held.owner.unwrap().as_str(), "worker-7");
    for _ in 0..8 {
        clock.advance(ttl / 4).await;
        let is_kept = async || lease.remaining() > ttl / 2;
        clock.until("the lease is renewed", is_kept).await;
    }
    lease.check().unwrap();
}

/// A service that panics if it is called before it was polled for readiness.
#[derive(Default)]
struct Asked(bool);

impl<R> Service<R> for Asked {
    type Response = ();
    type Error = Infallible;
    type Future = Ready<Result<(), Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.0 = true;
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: R) -> Self::Future {
        let was_polled = std::mem::take(&mut self.0);
        assert!(was_polled, "called without a check for readiness");
        ready(Ok(()))
    }
}

#[tokio::test]
async fn layer_polls_the_service_for_readiness() {
    let issued = Issued::start().await;
    let lease = issued.holder(30_000).acquire("sku-1").await.unwrap();
    let client = || {
        ServiceBuilder::new()
            .layer(lease.layer())
            .service(Asked::default())
    };
    let request = Request::get("/").body(()).unwrap();
    client().oneshot(request).await.unwrap();
    let url = "http://localhost/".parse().unwrap();
    let request = reqwest::Request::new(reqwest::Method::GET, url);
    client().oneshot(request).await.unwrap();
}

/// Returns a holder over HTTP, at an issuer that lets a request wait for at most this time.
async fn with_wait_limit(db: &Fresh<Sqlite>, limit: Duration) -> (Server, Holder<HttpLeases>) {
    let store = MemoryLeases::new(db.fence());
    let issuer = Issuer::new(store).wait_limit(limit);
    let server = Server::start(issuer.router()).await;
    let leases = HttpLeases::new(&server.url("/")).unwrap();
    (server, Holder::new(leases))
}

#[tokio::test]
async fn wait_above_the_issuer_limit_takes_several_requests() {
    let db = Sqlite::fresh(2).await;
    let (_server, holder) = with_wait_limit(&db, Duration::from_millis(500)).await;
    let first = holder.acquire("sku-1").await.unwrap();
    let patient = holder.clone().wait(Duration::from_secs(600));
    let waiting = tokio::spawn(async move { patient.acquire("sku-1").await });
    // This pause is longer than the issuer lets one request wait.
    sleep(Duration::from_millis(1_300)).await;
    assert!(!waiting.is_finished());
    let token = first.token();
    first.release().await.unwrap();
    let second = timeout(Duration::from_secs(10), waiting).await;
    assert!(second.unwrap().unwrap().unwrap().token() > token);

    let _held = holder.acquire("sku-2").await.unwrap();
    let began = Instant::now();
    let refused = holder.clone().wait(Duration::from_millis(1_200));
    let refused = refused.acquire("sku-2").await;
    assert_matches!(refused, Err(AcquireError::Lease(LeaseError::Held { .. })));
    let took = began.elapsed();
    assert!(took >= Duration::from_secs(1), "{took:?}");
}

#[tokio::test]
async fn try_acquire_does_not_wait() {
    let db = Sqlite::fresh(2).await;
    let holder = Holder::new(MemoryLeases::new(db.fence())).wait(Duration::from_secs(600));
    let lease = holder.try_acquire("sku-1").await.unwrap().unwrap();
    let other = timeout(Duration::from_secs(5), holder.try_acquire("sku-1")).await;
    assert!(other.unwrap().unwrap().is_none());
    lease.release().await.unwrap();
    holder.try_acquire("").await.unwrap_err();
}

#[tokio::test]
async fn several_leases_are_acquired_in_one_order() {
    let db = Sqlite::fresh(2).await;
    let holder = Holder::new(MemoryLeases::new(db.fence())).wait(Duration::from_secs(60));
    // If the leases were taken in opposite orders, the two holders would wait for each other.
    let rounds = [["a", "b"], ["b", "a"]].map(|names| {
        let holder = holder.clone();
        tokio::spawn(async move {
            for _ in 0..20 {
                let leases = holder.acquire_all(&names).await.unwrap();
                let taken = leases.iter().map(|lease| lease.resource().as_str());
                assert_eq!(Vec::from_iter(taken), names);
                sleep(Duration::from_millis(1)).await;
                for lease in leases {
                    lease.release().await.unwrap();
                }
            }
        })
    });
    for round in rounds {
        let round = timeout(Duration::from_secs(30), round).await;
        round.expect("the holders wait for each other").unwrap();
    }
    let repeated = holder.acquire_all(&["a", "b", "a"]).await.unwrap_err();
    assert!(matches!(&repeated, AcquireError::Repeated(name) if name.as_str() == "a"));
    // If one of the leases is refused, the leases that were granted before it are released.
    let _held = holder.acquire("b").await.unwrap();
    let hasty = holder.clone().wait(Duration::ZERO);
    hasty.acquire_all(&["b", "a"]).await.unwrap_err();
    soon!(
        "the other lease is released",
        hasty.try_acquire("a").await.unwrap().is_some()
    );
}

#[tokio::test(start_paused = true)]
async fn earlier_lease_is_kept_while_waiting_for_the_next() {
    let store = MemoryLeases::new(InMemory::default());
    let holder = Holder::new(store.clone()).wait(Duration::from_secs(60));
    let both = |holder: &Holder<MemoryLeases>| {
        let holder = holder.clone();
        tokio::spawn(async move { holder.acquire_all(&["a", "b"]).await })
    };
    let brief = holder.clone().progress_timeout(Duration::from_millis(300));
    let held = holder.acquire("b").await.unwrap();
    let waiting = both(&brief);
    sleep(Duration::from_secs(1)).await;
    held.release().await.unwrap();
    let leases = waiting.await.unwrap().unwrap();
    for lease in &leases {
        lease.check().unwrap();
    }
    drop(leases);

    let _held = holder.acquire("b").await.unwrap();
    let waiting = both(&holder.clone().ttl(Duration::from_millis(600)));
    let first = resource("a");
    eventually!(
        "the first lease is acquired and broken",
        store.break_lease(&first, None).await.unwrap()
    );
    let ended = timeout(Duration::from_secs(30), waiting).await;
    let ended = ended.expect("the loss is not noticed").unwrap();
    assert_matches!(ended, Err(AcquireError::Lease(LeaseError::Unavailable(_))));
}

/// The process is paused until its first lease has expired. When it resumes, the second lease is
/// granted before the timer reports the loss of the first one.
#[tokio::test]
async fn lease_lost_during_a_pause_is_not_returned() {
    let db = Sqlite::fresh(2).await;
    let store = MemoryLeases::new(db.fence());
    let holder = Holder::new(store.clone()).wait(Duration::from_secs(60));
    let held = holder.acquire("b").await.unwrap();
    let ttl = Duration::from_secs(3);
    let hasty = holder.ttl(ttl);
    let waiting = tokio::spawn(async move { hasty.acquire_all(&["a", "b"]).await });
    let [first, second] = ["a", "b"].map(resource);
    eventually("the holder waits for the second lease", async || {
        let held = store.inspect(&second).await.unwrap();
        held.is_some_and(|held| held.waiters == 1) && store.inspect(&first).await.unwrap().is_some()
    })
    .await;
    std::thread::sleep(ttl + Duration::from_millis(100));
    held.release().await.unwrap();
    let acquired = waiting.await.unwrap();
    assert_matches!(
        acquired,
        Err(AcquireError::Lease(LeaseError::Unavailable(_)))
    );
}

/// The issuer refuses every request that waits.
#[tokio::test]
async fn holder_polls_an_issuer_without_a_queue() {
    let db = Sqlite::fresh(2).await;
    let (_server, holder) = with_wait_limit(&db, Duration::ZERO).await;
    let holder = holder.wait(Duration::from_secs(30));
    let lease = holder.acquire("sku-1").await.unwrap();
    let waiting = tokio::spawn(async move { holder.acquire("sku-1").await });
    sleep(Duration::from_millis(200)).await;
    lease.release().await.unwrap();
    drop(waiting.await.unwrap().unwrap());
}

#[tokio::test(start_paused = true)]
async fn work_with_a_lease_ends_with_it() {
    let store = MemoryLeases::new(InMemory::default());
    let holder = Holder::new(store.clone());
    let token = holder.with_lease("sku-1", async |lease| lease.token());
    assert_eq!(token.await.unwrap().get(), 1_000_000_001);
    assert!(store.inspect(&sku()).await.unwrap().is_none());

    let _held = holder.acquire("sku-2").await.unwrap();
    let refused = holder.with_lease("sku-2", async |_| ()).await;
    assert_matches!(refused, Err(WithLeaseError::Acquire(_)));

    let bounded = holder.clone().max_hold(Duration::from_millis(200));
    let lost = bounded.with_lease("sku-1", async |_| std::future::pending::<()>().await);
    let lost = timeout(Duration::from_secs(10), lost).await.unwrap();
    assert_matches!(lost, Err(WithLeaseError::Lost(Loss::MaxHold { .. })));
    soon!(
        "the lease is released",
        store.inspect(&sku()).await.unwrap().is_none()
    );

    // The work continues while it reports progress.
    let watched = holder.progress_timeout(Duration::from_millis(300));
    let lost = watched.with_lease("sku-1", async |lease| {
        for _ in 0..6 {
            sleep(Duration::from_millis(100)).await;
            lease.progress();
        }
        std::future::pending::<()>().await;
    });
    let began = Instant::now();
    let lost = timeout(Duration::from_secs(10), lost).await.unwrap();
    assert_matches!(lost, Err(WithLeaseError::Lost(Loss::NoProgress { .. })));
    assert_eq!(began.elapsed().as_millis(), 900);
}

/// When the lease is lost, requests that the work has sent may still be in progress.
#[tokio::test(start_paused = true)]
async fn lock_delay_follows_a_loss() {
    let seconds = Duration::from_secs;
    let store = MemoryLeases::new(InMemory::default());
    let holder = Holder::new(store.clone())
        .ttl(seconds(20))
        .max_hold(seconds(1));
    let delayed = holder.clone().lock_delay(seconds(30));
    let next = Holder::new(store.clone()).wait(seconds(200));
    for (holder, blocked_for) in [(&holder, 0..=1), (&delayed, 49..=51)] {
        let lost = holder.with_lease("sku-1", async |_| std::future::pending::<()>().await);
        assert_matches!(lost.await, Err(WithLeaseError::Lost(Loss::MaxHold { .. })));
        let began = Instant::now();
        let lease = next.acquire("sku-1").await.unwrap();
        lease.release().await.unwrap();
        assert!(blocked_for.contains(&began.elapsed().as_secs()));
    }
    // The work has ended, so the program may release the lease.
    let lease = delayed.acquire("sku-2").await.unwrap();
    lease.lost().await;
    lease.release().await.unwrap();
    drop(next.try_acquire("sku-2").await.unwrap().unwrap());
}

/// Until [`Holder::acquire_all`] returns a lease, no work runs under it.
#[tokio::test(start_paused = true)]
async fn lock_delay_follows_only_a_loss_of_a_returned_lease() {
    let seconds = Duration::from_secs;
    let store = MemoryLeases::new(InMemory::default());
    let next = Holder::new(store.clone()).wait(seconds(200));
    let _held = next.acquire("sku-2").await.unwrap();
    let delayed = Holder::new(store)
        .ttl(seconds(20))
        .lock_delay(seconds(30))
        .max_hold(seconds(1))
        .wait(seconds(10));
    let refused = delayed.acquire_all(&["sku-1", "sku-2"]).await;
    assert_matches!(
        refused,
        Err(AcquireError::Lease(LeaseError::Unavailable(_)))
    );
    let began = Instant::now();
    drop(next.acquire("sku-1").await.unwrap());
    let took = began.elapsed();
    assert!(took < seconds(1), "the lost lease was not released");

    let leases = delayed.acquire_all(&["sku-3"]).await.unwrap();
    leases[0].lost().await;
    drop(leases);
    let began = Instant::now();
    drop(next.acquire("sku-3").await.unwrap());
    assert!((49..=51).contains(&began.elapsed().as_secs()));
}
