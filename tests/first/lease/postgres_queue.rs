//! The queue of waiters in Postgres: processes that end or freeze, and lost connections.

use std::time::Duration;

use sqlx::{Executor, Postgres, postgres::PgListener};
use tokio::time::{Instant, sleep, timeout};
use tower_fence::{
    Fence, Resource,
    lease::{Acquire, LeaseError, LeaseId, Leases, PostgresLeases, Renew},
};

use crate::support::{
    PATIENCE, SOON,
    database::{Fresh, TestDatabase, WAITING_FOR_LOCK, pool_of, read},
    eventually,
    functions::{acquire, is_refused, release},
    lease::{
        LONG, grant, grant_and_release, granted, is_held, is_misconfigured, next_grant, renew_for,
        sku, spawn_acquire, wait, waiters,
    },
    process::{Inventory, frozen_process_delays_the_next_waiter},
    store::listen,
};

/// Returns a store with its own pool, as if in another process.
async fn other_process(db: &Fresh<Postgres>) -> PostgresLeases {
    PostgresLeases::new(Fence::new(pool_of(&db.url, 3).await))
}

/// Registers listener 7, like a process that serves waiters.
async fn listener_7(db: &Fresh<Postgres>) -> PgListener {
    let mut listener = PgListener::connect(&db.url).await.unwrap();
    let register = "SELECT tower_fence.lease_listen(7)";
    listener.execute(register).await.unwrap();
    listener.listen("tower_fence_7").await.unwrap();
    listener
}

/// Queues waiters for `sku-1`. Each is given by its ticket, which is also its position and its
/// lease id, and by its listener.
async fn queue(db: &Fresh<Postgres>, waiters: &[(i64, i64)]) {
    for (ticket, listener) in waiters {
        db.execute(&format!(
            "INSERT INTO tower_fence.queues (resource) VALUES ('sku-1') ON CONFLICT DO NOTHING; \
             INSERT INTO tower_fence.waiters (resource, ticket, place, lease, listener) \
             VALUES ('sku-1', {ticket}, {ticket}, '{ticket}', {listener})"
        ))
        .await;
    }
}

/// Lets the request with this ticket and this lease id retry.
async fn ask(db: &Fresh<Postgres>, lease: &str, ticket: i64) -> String {
    let ask = format!(
        "SELECT (tower_fence.lease_ask('sku-1', '{lease}', 1000, 0, NULL, {ticket}, true, 7)).outcome"
    );
    read(&db.pool, &ask).await
}

/// Returns the next notification: a ticket, and the time for which the resource is blocked.
async fn called(listener: &mut PgListener) -> String {
    let notification = timeout(PATIENCE, listener.recv()).await;
    notification.unwrap().unwrap().payload().to_owned()
}

/// Queues waiters in a runtime that then ends. Its connections end with it, and its waiters do not
/// leave the queue. Returns when the waiters are no longer counted, but are still in the queue.
async fn waiters_of_ended_process(db: &Fresh<Postgres>, count: usize) {
    for _ in 0..10 {
        let url = db.url.clone();
        let short_lived = move || {
            let runtime = tokio::runtime::Runtime::new().unwrap();
            runtime.block_on(async {
                let leases = PostgresLeases::new(Fence::new(pool_of(&url, 2).await));
                for _ in 0..count {
                    wait(&leases, LONG).await;
                }
            });
            runtime.shutdown_background();
        };
        std::thread::spawn(short_lived).join().unwrap();
        let leases = PostgresLeases::new(db.fence());
        eventually!("the waiters are not counted", waiters(&leases).await == 0);
        // A process that begins to listen removes the waiters of ended processes. If the server
        // executes its call late, the call also removes these waiters.
        let left = "tower_fence.waiters WHERE resource = 'sku-1'";
        if db.count(left).await >= count as i64 {
            return;
        }
    }
    panic!("the waiters were removed each time");
}

/// The first waiter was notified of its turn, but its process ended before it received the
/// notification.
#[tokio::test]
async fn waiter_behind_a_removed_waiter_is_notified() {
    let db = Postgres::fresh(4).await;
    let leases = PostgresLeases::new(db.fence());
    grant_and_release(&leases).await;
    let mut alive = listener_7(&db).await;
    queue(&db, &[(1, 8), (2, 8), (3, 7)]).await;
    assert_eq!(db.number("SELECT tower_fence.lease_sweep()").await, 2);
    assert_eq!(called(&mut alive).await, "3 0");
    assert_eq!(db.number("SELECT tower_fence.lease_sweep()").await, 0);
}

/// The first waiter has missed its turn, because its process is frozen.
#[tokio::test]
async fn waiter_behind_a_removed_waiter_has_a_turn_of_its_own() {
    let db = Postgres::fresh(4).await;
    grant(&PostgresLeases::new(db.fence()), &sku(), LONG).await;
    let _alive = listener_7(&db).await;
    let mut frozen = PgListener::connect(&db.url).await.unwrap();
    let register = "SELECT tower_fence.lease_listen(8)";
    frozen.execute(register).await.unwrap();
    frozen.listen("tower_fence_8").await.unwrap();
    let expire = "UPDATE tower_fence.leases SET expires_at = now() - interval '3 s'";
    db.execute(expire).await;
    queue(&db, &[(1, 8), (2, 7)]).await;
    assert_eq!(ask(&db, "3", 3).await, "queued");
    let tickets = "SELECT sum(ticket)::bigint FROM tower_fence.waiters";
    assert_eq!(db.number(tickets).await, 2 + 3);
    // When the process resumes, its request retries.
    assert_eq!(called(&mut frozen).await, "1 0");
}

#[tokio::test]
async fn waiters_of_an_ended_session_are_not_counted() {
    let db = Postgres::fresh(4).await;
    let leases = PostgresLeases::new(db.fence());
    grant(&leases, &sku(), LONG).await;
    let _alive = listener_7(&db).await;
    // The number of listener 8 is registered for a session with another name, and listener 9 is
    // not registered.
    let register = "INSERT INTO tower_fence.listeners (listener, pid) VALUES (8, pg_backend_pid())";
    db.execute(register).await;
    queue(&db, &[(1, 8), (2, 7), (3, 9)]).await;
    let held = leases.inspect(&sku()).await.unwrap().unwrap();
    assert_eq!(held.waiters, 1);
}

/// A transaction sees the sessions that were open when it first looked for one.
#[tokio::test]
async fn listener_that_registers_during_a_sweep_is_kept() {
    let db = Postgres::fresh(4).await;
    let waiters_of_ended_listeners = "INSERT INTO tower_fence.waiters (resource, ticket, place, lease, listener) VALUES \
         ('sku-1', 1, 1, 'a', 8), ('sku-2', 2, 2, 'b', 9); \
         INSERT INTO tower_fence.listeners (listener, pid) VALUES (8, pg_backend_pid())";
    db.execute(waiters_of_ended_listeners).await;
    let mut sweep = db.pool.begin().await.unwrap();
    let removed = "SELECT tower_fence.lease_sweep()";
    let removed = Postgres::number(&mut sweep, removed).await.unwrap();
    assert_eq!(removed, 0, "the queues have no row");
    let _alive = listener_7(&db).await;
    Postgres::run(&mut sweep, "SELECT tower_fence.lease_sweep()").await;
    sweep.commit().await.unwrap();
    let listeners = "SELECT sum(listener)::bigint FROM tower_fence.listeners";
    assert_eq!(db.number(listeners).await, 7);
}

/// The order of two waiters in their process can differ from that in the database.
#[tokio::test]
async fn waiter_that_retries_too_early_wakes_the_first_one() {
    let db = Postgres::fresh(4).await;
    let leases = PostgresLeases::new(db.fence());
    listen(&leases).await;
    grant(&leases, &sku(), Duration::from_millis(1)).await;
    let mut alive = listener_7(&db).await;
    queue(&db, &[(1, 7), (2, 7)]).await;
    assert_eq!(ask(&db, "2", 2).await, "queued");
    assert_eq!(called(&mut alive).await, "1 0");
    // If the first one leaves, its successor is notified.
    let leave = "SELECT tower_fence.lease_end('sku-1', '1', 1)";
    db.execute(leave).await;
    assert_eq!(called(&mut alive).await, "2 0");
}

#[tokio::test]
async fn first_waiter_is_notified_of_a_shorter_renewal() {
    let db = Postgres::fresh(4).await;
    let leases = PostgresLeases::new(db.fence());
    let delayed = Acquire::new(LONG).lock_delay(LONG);
    let held = leases.acquire(&sku(), delayed).await.unwrap();
    let mut alive = listener_7(&db).await;
    queue(&db, &[(1, 7), (2, 7)]).await;
    renew_for(&leases, &held, LONG / 2).await;
    for ticket in [1, 2] {
        let called = called(&mut alive).await;
        let blocked_ms = called.strip_prefix(&format!("{ticket} ")).unwrap();
        let blocked_ms: u64 = blocked_ms.parse().unwrap();
        assert!((60_001..=90_000).contains(&blocked_ms), "{called:?}");
        // If the first waiter gives up, its successor is notified.
        let give_up = format!(
            "SELECT tower_fence.lease_ask('sku-1', '{ticket}', 1000, 0, NULL, {ticket}, true, NULL)"
        );
        db.execute(&give_up).await;
    }
}

/// Another process displaces the first request. The new request must retry at the expiry.
#[tokio::test]
async fn repeated_first_request_stays_first() {
    let db = Postgres::fresh(4).await;
    grant(&PostgresLeases::new(db.fence()), &sku(), LONG).await;
    for (ticket, lease, owner, in_queue, listener, first) in [
        (1_i64, "a", None, false, 7_i64, 1),
        (2, "b", None, false, 7, 1),
        (3, "a", Some("one"), false, 8, 3),
        (4, "a", None, false, 9, 4),
        // The process of the request has connected again.
        (4, "a", None, true, 10, 4),
    ] {
        let ask = "SELECT a.outcome, a.blocked_ms \
                   FROM tower_fence.lease_ask('sku-1', $2::bytea, 1000, 0, $3, $1, $4, $5) AS a";
        let asked = sqlx::query_as(ask).bind(ticket).bind(lease.as_bytes());
        let asked = asked.bind(owner).bind(in_queue).bind(listener);
        let (asked, blocked_ms): (String, i64) = asked.fetch_one(&db.pool).await.unwrap();
        assert_eq!(asked, "queued", "ticket {ticket}");
        let by_place = "SELECT ticket FROM tower_fence.waiters ORDER BY place, ticket LIMIT 1";
        assert_eq!(db.number(by_place).await, first, "ticket {ticket}");
        if ticket == first {
            assert!(u128::try_from(blocked_ms).unwrap() <= LONG.as_millis());
        }
        let notified = format!("SELECT listener FROM tower_fence.waiters WHERE ticket = {ticket}");
        assert_eq!(db.number(&notified).await, listener, "ticket {ticket}");
    }
    let named = "tower_fence.waiters WHERE ticket = 4 AND owner = 'one'";
    assert_eq!(db.count(named).await, 1);
    // A displaced request does not take its position back.
    assert_eq!(ask(&db, "a", 3).await, "displaced");
    assert_eq!(db.count(named).await, 1);
}

/// Another process was granted the lease under the lease id of the first request.
#[tokio::test]
async fn waiter_is_notified_of_a_lease_under_its_own_id() {
    let db = Postgres::fresh(4).await;
    grant_and_release(&PostgresLeases::new(db.fence())).await;
    let mut alive = listener_7(&db).await;
    queue(&db, &[(1, 7)]).await;
    let granted =
        "SELECT (tower_fence.lease_ask('sku-1', '1', 60000, 0, NULL, 9, false, NULL)).outcome";
    assert_eq!(read::<String>(&db.pool, granted).await, "granted");
    db.execute("SELECT tower_fence.lease_call('sku-1')").await;
    assert_eq!(called(&mut alive).await, "1 0");
}

/// The second request returned the lease of the first one. Either client may hold the lease.
#[tokio::test]
async fn an_abandoned_request_takes_no_lease_that_another_one_returned() {
    // If a write has used the token, the second request gets another token.
    for is_used in [false, true] {
        let db = Postgres::fresh(4).await;
        for ticket in [1, 2] {
            let ask = format!(
                "SELECT (tower_fence.lease_ask('sku-1', 'a', 60000, 0, NULL, {ticket}, false, NULL)).outcome"
            );
            let asked: String = read(&db.pool, &ask).await;
            assert_eq!(asked, "granted", "ticket {ticket}");
            if is_used {
                let write = "SELECT tower_fence.admit(resource, token) FROM tower_fence.leases";
                db.execute(write).await;
            }
        }
        for ticket in [1, 2] {
            let abandon = format!("SELECT tower_fence.lease_end('sku-1', 'a', {ticket})");
            db.execute(&abandon).await;
            let held = db.count("tower_fence.held_leases").await;
            assert_eq!(held, 1, "ticket {ticket}, used: {is_used}");
        }
    }
}

/// Otherwise the answers would contain different tokens, and only the highest one would be valid.
#[tokio::test]
async fn concurrent_requests_under_one_lease_id_are_granted_one_token() {
    let db = Postgres::fresh(5).await;
    let leases = PostgresLeases::new(db.fence());
    let last = grant_and_release(&leases).await;
    let mut holder = db.pool.begin().await.unwrap();
    Postgres::run(&mut holder, "SELECT FROM tower_fence.resources FOR UPDATE").await;
    let requests = [1_i64, 2, 3].map(|ticket| {
        let pool = db.pool.clone();
        tokio::spawn(async move {
            let ask = "SELECT a.outcome, a.token \
                FROM tower_fence.lease_ask('sku-1', 'a', 60000, 0, NULL, $1, false, NULL) AS a";
            let asked = sqlx::query_as(ask).bind(ticket).fetch_one(&pool).await;
            let asked: (String, Option<i64>) = asked.unwrap();
            asked
        })
    });
    eventually!(
        "all requests wait for the row",
        db.number(WAITING_FOR_LOCK).await == 3
    );
    holder.commit().await.unwrap();
    let mut outcomes = Vec::new();
    for request in requests {
        outcomes.push(request.await.unwrap());
    }
    outcomes.sort();
    let granted = ("granted".to_owned(), Some(last.token.get() + 1));
    let again = ("again".to_owned(), None);
    assert_eq!(outcomes, [again.clone(), again, granted]);
}

/// Two requests under one lease id may join the queue at the same time.
#[tokio::test]
async fn repeated_request_displaces_only_one_of_two() {
    let db = Postgres::fresh(4).await;
    grant(&PostgresLeases::new(db.fence()), &sku(), LONG).await;
    // With these statistics, Postgres runs a subquery in FROM once for each row.
    for sql in [
        "INSERT INTO tower_fence.waiters (resource, ticket, lease, listener) VALUES ('other', 1, 'b', 7)",
        "ANALYZE tower_fence.waiters",
        "INSERT INTO tower_fence.waiters (resource, ticket, lease, listener) \
         VALUES ('sku-1', 1, 'a', 7), ('sku-1', 2, 'a', 7)",
    ] {
        db.execute(sql).await;
    }
    let repeat = "SELECT tower_fence.lease_ask('sku-1', 'a', 1000, 0, NULL, 3, false, 7)";
    db.execute(repeat).await;
    for (ticket, count) in [(1, 0), (2, 1), (3, 1)] {
        let found = format!("tower_fence.waiters WHERE resource = 'sku-1' AND ticket = {ticket}");
        assert_eq!(db.count(&found).await, count, "ticket {ticket}");
    }
}

/// The wait of a client is over, and its kept position is granted the lease. The client then renews
/// the lease at this issuer or at another one.
#[tokio::test]
async fn renewed_lease_of_a_kept_position_is_kept() {
    let db = Postgres::fresh(4).await;
    let (one, two) = (PostgresLeases::new(db.fence()), other_process(&db).await);
    let mut renewed = vec![];
    for (issuer, resource) in [(&one, "sku-1"), (&two, "sku-2")] {
        let resource = Resource::new(resource).unwrap();
        let first = grant(&one, &resource, LONG).await;
        let id = LeaseId::random();
        let request = Acquire::new(LONG).lease_id(id.clone());
        let request = request.wait(Duration::from_millis(300));
        one.acquire(&resource, request).await.unwrap_err();
        one.release(&resource, &first.id).await.unwrap();
        eventually("the kept position is granted the lease", async || {
            let held = one.inspect(&resource).await.unwrap();
            held.is_some_and(|held| held.token > first.token)
        })
        .await;
        let lease = issuer.renew(&resource, &id, Renew::new(LONG)).await;
        renewed.push(lease.unwrap());
    }
    // By then, the issuer has removed the traces of both requests.
    sleep(Duration::from_secs(4)).await;
    let mut kept = vec![];
    for lease in renewed {
        let held = one.inspect(&lease.resource).await.unwrap();
        kept.push(held.is_some_and(|held| held.token == lease.token));
    }
    assert_eq!(kept, [true; 2]);
}

/// The process cannot register a listener.
#[tokio::test]
async fn waiter_without_notifications_polls_until_its_timeout() {
    let db = Postgres::fresh(4).await;
    let remove = "DROP FUNCTION tower_fence.lease_listen(bigint)";
    db.execute(remove).await;
    let leases = PostgresLeases::new(db.fence());
    let first = grant(&leases, &sku(), LONG).await;
    let request = Acquire::new(LONG).wait(Duration::from_secs(3));
    is_held(leases.acquire(&sku(), request).await);
    let request = Acquire::new(LONG).wait(Duration::from_millis(100));
    is_misconfigured(leases.acquire(&sku(), request).await);
    let waiting = spawn_acquire(&leases, &sku(), Acquire::new(LONG).wait(LONG));
    sleep(Duration::from_millis(100)).await;
    leases.release(&sku(), &first.id).await.unwrap();
    granted(waiting).await;
}

#[tokio::test]
async fn waiters_of_an_ended_process_are_skipped() {
    let db = Postgres::fresh(4).await;
    let leases = PostgresLeases::new(db.fence());
    // A process that starts later removes the waiters of ended processes.
    listen(&leases).await;
    let first = grant(&leases, &sku(), LONG).await;
    waiters_of_ended_process(&db, 20).await;
    let survivor = wait(&leases, LONG).await;
    leases.release(&sku(), &first.id).await.unwrap();
    let survivor = granted(survivor).await;
    leases.release(&sku(), &survivor.id).await.unwrap();
    assert_eq!(db.count("tower_fence.waiters").await, 0);

    // If no other client waits, the next request detects that the waiters have ended.
    let first = grant(&leases, &sku(), LONG).await;
    waiters_of_ended_process(&db, 3).await;
    leases.release(&sku(), &first.id).await.unwrap();
    // The release may still be skipping these waiters.
    let next = next_grant(&leases, LONG).await;
    leases.release(&sku(), &next.id).await.unwrap();

    // If the lease expires, no release notifies the remaining waiter.
    grant(&leases, &sku(), LONG).await;
    waiters_of_ended_process(&db, 3).await;
    let survivor = wait(&leases, LONG).await;
    let expire = "UPDATE tower_fence.leases SET expires_at = clock_timestamp()";
    db.execute(expire).await;
    granted(survivor).await;
}

#[tokio::test]
async fn next_listening_process_removes_waiters_of_ended_processes() {
    let db = Postgres::fresh(4).await;
    let leases = PostgresLeases::new(db.fence());
    grant(&leases, &sku(), LONG).await;
    waiters_of_ended_process(&db, 5).await;
    let other = Resource::new("other").unwrap();
    let held = grant(&leases, &other, LONG).await;
    let waiting = spawn_acquire(&leases, &other, Acquire::new(LONG).wait(LONG));
    let left = "tower_fence.waiters WHERE resource = 'sku-1'";
    eventually!("the waiters have left the queue", db.count(left).await == 0);
    leases.release(&other, &held.id).await.unwrap();
    granted(waiting).await;
}

/// A session that only receives notifications counts as idle. If the session ended, the order of
/// the waiters would be lost.
#[tokio::test]
async fn idle_session_timeout_does_not_end_the_listening_session() {
    let db = Postgres::fresh(4).await;
    db.execute(
        "DO $$ BEGIN EXECUTE format( \
             'ALTER DATABASE %I SET idle_session_timeout = 400', current_database() \
         ); END $$",
    )
    .await;
    let leases = PostgresLeases::new(db.fence());
    let first = grant(&leases, &sku(), LONG).await;
    let waiting = wait(&leases, LONG).await;
    let listener = "SELECT listener FROM tower_fence.waiters";
    let before = db.number(listener).await;
    sleep(Duration::from_millis(1_500)).await;
    assert_eq!(db.number(listener).await, before);
    leases.release(&sku(), &first.id).await.unwrap();
    granted(waiting).await;
}

/// Otherwise the database could not be dropped while a part of the application has the store.
#[tokio::test]
async fn listening_session_ends_with_the_pool() {
    let db = Postgres::fresh(4).await;
    let pool = pool_of(&db.url, 3).await;
    let leases = PostgresLeases::new(Fence::new(pool.clone()));
    let held = grant(&leases, &sku(), LONG).await;
    let waiting = wait(&leases, LONG).await;
    leases.release(&sku(), &held.id).await.unwrap();
    granted(waiting).await;
    let listening = "pg_stat_activity \
        WHERE datname = current_database() AND application_name LIKE 'tower-fence %'";
    assert_eq!(db.count(listening).await, 1);
    pool.close().await;
    eventually!("the session has ended", db.count(listening).await == 0);
}

#[tokio::test]
async fn lost_connection_is_reopened() {
    let db = Postgres::fresh(4).await;
    let leases = PostgresLeases::new(db.fence());
    let first = grant(&leases, &sku(), LONG).await;
    let waiting = wait(&leases, LONG).await;
    let listener = "SELECT listener FROM tower_fence.waiters";
    let before = db.number(listener).await;
    let killed = "SELECT count(pg_terminate_backend(pid)) FROM tower_fence.listeners";
    assert_eq!(db.number(killed).await, 1);
    let moved = format!("tower_fence.waiters WHERE listener NOT IN (0, {before})");
    eventually!(
        "another listener serves the waiter",
        db.count(&moved).await == 1
    );
    leases.release(&sku(), &first.id).await.unwrap();
    let released_at = Instant::now();
    granted(waiting).await;
    println!("notified {:?} after the release", released_at.elapsed());
}

/// A call that releases or breaks a lease reads the queue, and a waiter that joins the queue reads
/// the lease, so one of the two sees the other.
#[tokio::test]
async fn no_waiter_joins_the_queue_during_a_release() {
    let db = Postgres::fresh(4).await;
    let leases = PostgresLeases::new(db.fence());
    let held = grant(&leases, &sku(), LONG).await;
    let mut releasing = db.pool.begin().await.unwrap();
    let released = release(&mut releasing, "sku-1", held.id.expose()).await;
    released.unwrap();
    let waiting = spawn_acquire(&leases, &sku(), Acquire::new(LONG).wait(LONG));
    // The wait still ends at its timeout.
    let limited = Acquire::new(LONG).wait(Duration::from_millis(300));
    let refused = timeout(Duration::from_secs(20), leases.acquire(&sku(), limited)).await;
    is_held(refused.expect("the waiter does not stop polling"));
    sleep(Duration::from_millis(800)).await;
    assert_eq!(db.count("tower_fence.waiters").await, 0);
    releasing.commit().await.unwrap();
    granted(waiting).await;
}

#[tokio::test]
async fn script_does_not_overtake_waiters() {
    let db = Postgres::fresh(4).await;
    let leases = PostgresLeases::new(db.fence());
    let mut conn = db.pool.acquire().await.unwrap();
    for _ in 0..20 {
        let first = acquire(&mut conn, "sku-1", "60 s").await.unwrap();
        let waiting = wait(&leases, LONG).await;
        release(&mut conn, "sku-1", &first.lease_id).await.unwrap();
        let refused = is_refused(acquire(&mut conn, "sku-1", "60 s").await, "TF409");
        // The resource is not blocked, but reserved for the waiter.
        let retry_after = refused.problem["retry_after_ms"].as_u64();
        assert!(retry_after > Some(0), "{refused:?}");
        let lease = granted(waiting).await;
        leases.release(&sku(), &lease.id).await.unwrap();
    }
}

#[tokio::test]
async fn waiters_poll_without_a_session_that_can_listen() {
    let db = Postgres::fresh(4).await;
    // With this setting, the issuer does not listen, because it may be behind a pooler in
    // transaction mode.
    let leases = PostgresLeases::new(db.fence_with(|fence| fence.transaction_pooling(true)));
    let first = grant(&leases, &sku(), LONG).await;
    let waiting = spawn_acquire(&leases, &sku(), Acquire::new(LONG).wait(LONG));
    sleep(Duration::from_millis(300)).await;
    assert_eq!(waiters(&leases).await, 0);
    leases.release(&sku(), &first.id).await.unwrap();
    let second = granted(waiting).await;
    // With a direct connection to the server, the waiter is in the queue.
    let leases = leases.listen_with(db.url.parse().unwrap());
    let waiting = wait(&leases, LONG).await;
    leases.release(&sku(), &second.id).await.unwrap();
    granted(waiting).await;
}

#[tokio::test]
async fn wait_without_notifications_ends_at_its_timeout() {
    let db = Postgres::fresh(4).await;
    let nowhere = "postgres://nobody@127.0.0.1:1/nowhere".parse().unwrap();
    let leases = PostgresLeases::new(db.fence()).listen_with(nowhere);
    let held = grant(&leases, &sku(), LONG).await;
    let limit = Duration::from_millis(700);
    let asked_at = Instant::now();
    let refused = leases.acquire(&sku(), Acquire::new(LONG).wait(limit)).await;
    assert_matches!(
        refused,
        Err(LeaseError::Unavailable(_) | LeaseError::Held { .. })
    );
    assert!(asked_at.elapsed() < limit + SOON);
    // While its issuer cannot listen, the waiter polls.
    let waiting = spawn_acquire(&leases, &sku(), Acquire::new(LONG).wait(LONG));
    leases.release(&sku(), &held.id).await.unwrap();
    granted(waiting).await;
}

/// A waiter joins the queue while the request before it is being granted. The store must notify the
/// waiter of the expiry of the new lease, because that lease may never be released.
#[tokio::test]
async fn waiter_behind_a_grant_is_notified_of_its_end() {
    let db = Postgres::fresh(4).await;
    let (one, two) = (PostgresLeases::new(db.fence()), other_process(&db).await);
    let first = grant(&one, &sku(), LONG).await;
    let next = wait(&one, LONG).await;
    // From here on, each COMMIT of a grant takes a while.
    db.execute(
        "CREATE FUNCTION wait_a_while() RETURNS trigger LANGUAGE plpgsql AS $$ \
             BEGIN PERFORM pg_advisory_xact_lock(1); RETURN NULL; END $$; \
         CREATE CONSTRAINT TRIGGER slow AFTER UPDATE ON tower_fence.leases DEFERRABLE INITIALLY DEFERRED \
             FOR EACH ROW WHEN (NEW.lease IS NOT NULL) EXECUTE FUNCTION wait_a_while()",
    )
    .await;
    let mut slow = db.pool.begin().await.unwrap();
    Postgres::run(&mut slow, "SELECT pg_advisory_xact_lock(1)").await;
    one.release(&sku(), &first.id).await.unwrap();
    let waiting = "pg_locks WHERE locktype = 'advisory' AND NOT granted";
    eventually!("the grant is in progress", db.count(waiting).await == 1);
    let last = spawn_acquire(&two, &sku(), Acquire::new(LONG).wait(LONG));
    let line = "tower_fence.waiters";
    eventually!("both waiters are in the queue", db.count(line).await == 2);
    let mut heard = PgListener::connect(&db.url).await.unwrap();
    let behind = "SELECT listener FROM tower_fence.waiters ORDER BY place DESC LIMIT 1";
    let listener = db.number(behind).await;
    let channel = format!("tower_fence_{listener:x}");
    heard.listen(&channel).await.unwrap();
    slow.commit().await.unwrap();
    let lease = granted(next).await;
    let called = timeout(SOON, called(&mut heard)).await;
    let called = called.expect("the listener received no notification");
    let (_, blocked_ms) = called.split_once(' ').unwrap();
    assert!(blocked_ms.parse::<u64>().unwrap() > 0, "{called}");
    one.release(&sku(), &lease.id).await.unwrap();
    granted(last).await;
}

#[tokio::test]
async fn frozen_process_delays_the_next_waiter_briefly() {
    let db = Postgres::fresh(2).await;
    let variables = [("DATABASE_URL", db.url.as_str())];
    let frozen = Inventory::start(&variables).await;
    let mut other = Inventory::start(&variables).await;
    other.prints("leases:          Postgres", 1).await;
    frozen_process_delays_the_next_waiter(&frozen, &other, Duration::from_secs(2)).await;
}
