//! The holder and its guard: leases that are kept, leases that are lost, and who hears of it.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use axum::Router;
use futures_util::future::{join_all, pending};
use http::{Request, StatusCode};
use serde_json::json;
use sqlx::Sqlite;
use tokio::time::{Instant, sleep, timeout};
use tower::{ServiceBuilder, ServiceExt};
use tower_fence::{
    client::{AcquireError, Holder, HttpLeases, Loss},
    issuer::Issuer,
    lease::{Acquire, EmbeddedLeases, LeaseError, Leases, Operate, Owner},
};

use crate::{
    leases::sku,
    support::{
        database::{Fresh, TestDatabase},
        eventually,
        http::Server,
        proxy::{Link, Proxy},
    },
};

/// An issuer behind a proxy, and the store behind the issuer.
struct Issued {
    store: EmbeddedLeases,
    proxy: Proxy,
    _server: Server,
    _db: Fresh<Sqlite>,
}

impl Issued {
    async fn start() -> Self {
        let db = Sqlite::fresh(2).await;
        let store = EmbeddedLeases::new(db.fence());
        let issuer = Issuer::new(store.clone()).router();
        let server = Server::start(Router::new().nest("/locks", issuer)).await;
        Self {
            store,
            proxy: Proxy::to(server.addr).await,
            _server: server,
            _db: db,
        }
    }

    fn leases(&self) -> HttpLeases {
        HttpLeases::new(&format!("http://{}/locks", self.proxy.addr)).unwrap()
    }

    fn holder(&self, ttl_ms: u64) -> Holder<HttpLeases> {
        Holder::new(self.leases()).ttl(Duration::from_millis(ttl_ms))
    }

    async fn is_held(&self) -> bool {
        self.store.inspect(&sku()).await.unwrap().is_some()
    }

    async fn is_free_soon(&self) {
        eventually("the lease is free", async || !self.is_held().await).await;
    }
}

/// Notes when it is dropped.
struct Work(Arc<AtomicBool>);

impl Drop for Work {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_is_kept_over_ten_ttls_under_load() {
    let issued = Issued::start().await;
    let done = Arc::<AtomicBool>::default();
    let load = (0..8).map(|n| {
        let (leases, done) = (issued.leases(), done.clone());
        tokio::spawn(async move {
            let holder = Holder::new(leases);
            let mut grants = 0;
            while !done.load(Relaxed) {
                let lease = holder.acquire(format!("load-{n}")).await.unwrap();
                lease.release().await.unwrap();
                grants += 1;
            }
            grants
        })
    });
    let load: Vec<_> = load.collect();
    let ttl = Duration::from_millis(400);
    let lease = issued.holder(400).acquire("sku-1").await.unwrap();
    let began = Instant::now();
    while began.elapsed() < 10 * ttl {
        lease.check().unwrap();
        let held = issued.store.inspect(&sku()).await.unwrap().unwrap();
        assert_eq!(held.token, lease.token());
        assert!(lease.remaining() <= ttl);
        sleep(Duration::from_millis(20)).await;
    }
    done.store(true, Relaxed);
    let grants: u64 = join_all(load).await.into_iter().map(Result::unwrap).sum();
    assert!(grants > 100, "no load: {grants}");
    lease.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_issuer_that_is_away_for_less_than_the_ttl_costs_nothing() {
    for away in [Link::Cut, Link::Silent] {
        let issued = Issued::start().await;
        let lease = issued.holder(1_500).acquire("sku-1").await.unwrap();
        let token = lease.token();
        issued.proxy.set(away);
        sleep(Duration::from_millis(800)).await;
        issued.proxy.set(Link::Whole);
        sleep(Duration::from_millis(2_000)).await;
        lease.check().unwrap();
        let held = issued.store.inspect(&sku()).await.unwrap().unwrap();
        assert_eq!((held.token, lease.token()), (token, token));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_issuer_that_stays_away_costs_the_lease_when_its_time_is_up() {
    for away in [Link::Cut, Link::Silent] {
        let issued = Issued::start().await;
        let ttl = Duration::from_millis(900);
        let lease = issued.holder(900).acquire("sku-1").await.unwrap();
        sleep(Duration::from_millis(500)).await;
        let dropped = Arc::<AtomicBool>::default();
        let work = Work(dropped.clone());
        issued.proxy.set(away);
        let cut_at = Instant::now();
        let lost = tokio::spawn(lease.lost());
        let loss = lease.run(async move {
            let _work = work;
            pending::<()>().await;
        });
        let loss = timeout(Duration::from_secs(10), loss).await.unwrap();
        let after = cut_at.elapsed();
        assert!(
            matches!(loss, Err(Loss::Expired { cause: Some(_), .. })),
            "{loss:?}"
        );
        assert!(dropped.load(Relaxed), "the work goes on");
        // The last renewal that got through was before the cut, by no more than a third.
        assert!(after < ttl + Duration::from_millis(100), "late: {after:?}");
        assert!(after > ttl / 2, "early: {after:?}");
        assert!(matches!(lost.await.unwrap(), Loss::Expired { .. }));
        assert!(lease.check().is_err() && lease.remaining().is_zero());
        // It does not come back to life.
        issued.proxy.set(Link::Whole);
        issued.is_free_soon().await;
        assert!(lease.run(async {}).await.is_err());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_that_was_ended_by_force_is_lost_at_the_next_renewal() {
    let issued = Issued::start().await;
    let lease = issued.holder(900).acquire("sku-1").await.unwrap();
    issued.store.break_lease(&sku()).await.unwrap();
    let broken_at = Instant::now();
    let loss = lease.run(pending::<()>()).await.unwrap_err();
    assert!(matches!(loss, Loss::Refused { .. }), "{loss:?}");
    assert!(broken_at.elapsed() < Duration::from_millis(600));
    let released = lease.release().await;
    assert!(
        matches!(released, Err(LeaseError::Lost { .. })),
        "{released:?}"
    );
}

#[tokio::test]
async fn work_that_ends_in_time_has_its_result() {
    let issued = Issued::start().await;
    let lease = issued.holder(30_000).acquire("sku-1").await.unwrap();
    assert_eq!(lease.run(async { 7 }).await.unwrap(), 7);
    let lost = lease.lost();
    lease.release().await.unwrap();
    assert!(!issued.is_held().await);
    assert!(matches!(lost.await, Loss::GivenUp { .. }));
}

/// The runtime does not get to look at the timer, as in a process that was stopped.
#[tokio::test]
async fn a_process_that_slept_past_its_lease_sees_its_loss_first() {
    let issued = Issued::start().await;
    let lease = issued.holder(200).acquire("sku-1").await.unwrap();
    let (mut polls, mut slept) = (0, false);
    let work = std::future::poll_fn(|cx| {
        polls += 1;
        if !slept {
            std::thread::sleep(Duration::from_millis(300));
            slept = true;
        }
        cx.waker().wake_by_ref();
        std::task::Poll::<()>::Pending
    });
    let loss = lease.run(work).await.unwrap_err();
    assert!(matches!(loss, Loss::Expired { .. }), "{loss:?}");
    assert_eq!(polls, 1, "it went on after its lease");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_guard_that_is_dropped_gives_the_lease_back() {
    let issued = Issued::start().await;
    let holder = issued.holder(60_000);
    drop(holder.acquire("sku-1").await.unwrap());
    issued.is_free_soon().await;

    // Where there is no runtime.
    let lease = holder.acquire("sku-1").await.unwrap();
    std::thread::spawn(move || drop(lease)).join().unwrap();
    issued.is_free_soon().await;

    // By work that panics.
    let lease = holder.acquire("sku-1").await.unwrap();
    let panicked = tokio::spawn(async move { lease.run(async { panic!("as it should") }).await });
    panicked.await.unwrap_err();
    issued.is_free_soon().await;

    // By a request that is dropped while it waits in line.
    let other = holder.acquire("sku-1").await.unwrap();
    let waiting = holder.clone().wait(Duration::from_secs(60));
    timeout(Duration::from_millis(300), waiting.acquire("sku-1"))
        .await
        .unwrap_err();
    other.release().await.unwrap();
    issued.is_free_soon().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_renewal_outlives_its_runtime() {
    let issued = Issued::start().await;
    let holder = issued.holder(700);
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let lease = runtime.block_on(async move {
            let lease = holder.acquire("sku-1").await.unwrap();
            sleep(Duration::from_millis(1_000)).await;
            lease.check().unwrap();
            lease
        });
        runtime.shutdown_background();
        // Nobody is left to give it back.
        drop(lease);
    })
    .join()
    .unwrap();
    assert!(issued.is_held().await);
    let ended_at = Instant::now();
    issued.is_free_soon().await;
    assert!(ended_at.elapsed() < Duration::from_millis(1_000));
}

#[tokio::test]
async fn a_new_token_goes_along_with_the_next_write() {
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
    assert_eq!(
        sent.await.unwrap().unwrap(),
        format!("{third};resource=\"sku-1\"")
    );

    issued.store.break_lease(&sku()).await.unwrap();
    let refused = lease.renew_with_new_token().await;
    assert!(
        matches!(refused, Err(LeaseError::Lost { .. })),
        "{refused:?}"
    );
    assert!(matches!(lease.check(), Err(Loss::Refused { .. })));
}

#[tokio::test]
async fn no_time_is_too_long() {
    let db = Sqlite::fresh(2).await;
    let holder = Holder::new(EmbeddedLeases::new(db.fence()));
    let holder = holder.ttl(Duration::MAX).wait(Duration::MAX);
    let lease = holder.acquire("sku-1").await.unwrap();
    let first = lease.token();
    assert!(lease.renew_with_new_token().await.unwrap().token > first);
    lease.release().await.unwrap();
}

#[tokio::test]
async fn an_outranked_token_is_a_loss_and_a_used_one_is_not() {
    let issued = Issued::start().await;
    let lease = issued.holder(30_000).acquire("sku-1").await.unwrap();
    let problem = |resource: &str, max_token: i64| {
        let problem = json!({
            "type": "urn:tower-fence:problem:stale-token",
            "resource": resource,
            "presented_token": lease.token(),
            "max_token": max_token,
        });
        problem.to_string().into_bytes()
    };
    let refused = StatusCode::PRECONDITION_FAILED;
    let own = lease.token().get();
    lease.observe(refused, &problem("sku-1", own)).unwrap();
    lease.observe(refused, &problem("sku-2", own + 1)).unwrap();
    lease
        .observe(StatusCode::OK, &problem("sku-1", own + 1))
        .unwrap();
    lease.observe(refused, b"something else").unwrap();
    let lost = lease.lost();
    let loss = lease
        .observe(refused, &problem("sku-1", own + 1))
        .unwrap_err();
    assert!(matches!(loss, Loss::Outranked(_)), "{loss:?}");
    assert!(matches!(lost.await, Loss::Outranked(stale) if stale.max_token.get() == own + 1));
    assert!(lease.run(async {}).await.is_err());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_holder_asks_again_as_long_as_it_may_wait() {
    let issued = Issued::start().await;
    issued.proxy.set(Link::Cut);
    let refused = issued.holder(30_000).acquire("sku-1").await.unwrap_err();
    assert!(
        matches!(refused, AcquireError::Lease(LeaseError::Unavailable(_))),
        "{refused:?}"
    );
    let limit = Duration::from_millis(700);
    let asked_at = Instant::now();
    let waiting = issued.holder(30_000).wait(limit);
    waiting.acquire("sku-1").await.unwrap_err();
    assert!(asked_at.elapsed() <= limit + Duration::from_millis(200));

    let waiting = issued.holder(30_000).wait(Duration::from_secs(20));
    let waiting = tokio::spawn(async move { waiting.acquire("sku-1").await });
    sleep(Duration::from_millis(500)).await;
    issued.proxy.set(Link::Whole);
    let lease = timeout(Duration::from_secs(5), waiting).await.unwrap();
    lease.unwrap().unwrap().check().unwrap();

    let invalid = issued.holder(1).wait(Duration::from_secs(20));
    let invalid = timeout(Duration::from_secs(5), invalid.acquire("sku-1"));
    match invalid.await.expect("it asks again in vain").unwrap_err() {
        AcquireError::Lease(LeaseError::Invalid { field, .. }) => assert_eq!(field, "ttl_ms"),
        error => panic!("{error:?}"),
    }
    let unnamed = issued.holder(30_000).acquire("").await.unwrap_err();
    assert!(matches!(unnamed, AcquireError::Resource(_)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_grant_whose_answer_was_lost_is_found_again() {
    let issued = Issued::start().await;
    let before = issued.holder(30_000).acquire("sku-1").await.unwrap();
    let token = before.token().get();
    before.release().await.unwrap();
    let waiting = issued.holder(30_000).wait(Duration::from_secs(20));
    issued.proxy.set(Link::NoAnswer);
    let asking = tokio::spawn(async move { waiting.acquire("sku-1").await });
    eventually("it is granted", async || issued.is_held().await).await;
    issued.proxy.set(Link::Whole);
    let lease = asking.await.unwrap().unwrap();
    assert_eq!(lease.token().get(), token + 1, "granted twice");
    lease.release().await.unwrap();

    // Where nobody asks again, it is given back.
    issued.proxy.set(Link::NoAnswer);
    issued.holder(60_000).acquire("sku-1").await.unwrap_err();
    issued.proxy.set(Link::Whole);
    issued.is_free_soon().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_after_a_long_wait_has_its_whole_time() {
    let issued = Issued::start().await;
    let ttl = Duration::from_millis(900);
    let first = Acquire::new(Duration::from_secs(60));
    let first = issued.store.acquire(&sku(), first).await.unwrap();
    let waiting = issued.holder(900).wait(Duration::from_secs(20));
    let owner = Owner::new("worker-7").unwrap();
    let waiting = tokio::spawn(async move { waiting.owner(owner).acquire("sku-1").await });
    sleep(2 * ttl).await;
    issued.store.release(&sku(), &first.id).await.unwrap();
    let lease = waiting.await.unwrap().unwrap();
    assert!(lease.remaining() > ttl / 2, "{:?}", lease.remaining());
    let held = issued.store.inspect(&sku()).await.unwrap().unwrap();
    assert_eq!(held.owner.unwrap().as_str(), "worker-7");
    sleep(2 * ttl).await;
    lease.check().unwrap();
}
