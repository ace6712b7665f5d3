//! Leases in Postgres that are not disturbed by an unprivileged role, a flood of notifications, or
//! a frozen writer.

use std::{
    io::{ErrorKind, Read, Write},
    net::{TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
        mpsc,
    },
    thread,
    time::Duration,
};

use reqwest::Url;
use sqlx::{Connection, PgConnection, Postgres, postgres::PgConnectOptions};
use tokio::{
    task::JoinSet,
    time::{sleep, timeout},
};
use tower_fence::{
    Fence,
    lease::{Acquire, LeaseAdmin, LeaseError, Leases, PostgresLeases},
};

use crate::support::{
    PATIENCE, SOON,
    database::{Fresh, TestDatabase, WAITING_FOR_LOCK, read},
    eventually,
    fence::resource,
    functions::{acquire, admit},
    lease::{LONG, grant, granted, sku, spawn_acquire, wait},
};

#[tokio::test]
async fn advisory_locks_of_other_roles_delay_no_request() {
    let db = Postgres::fresh(4).await;
    let leases = PostgresLeases::new(db.fence());
    let stranger = db.role("").await;
    let mut locks = stranger.connect().await;
    // This locks all keys that a hash of the name may yield, and those that sessions visibly hold.
    let seeds = "SELECT pg_advisory_lock(hashtextextended('sku-1', seed)) FROM unnest(ARRAY[0, 7463876215]) AS seed";
    Postgres::run(&mut locks, seeds).await;
    let first = grant(&leases, &sku(), LONG).await;
    let next = wait(&leases, LONG).await;
    let seen = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid <> \
         ALL (SELECT pid FROM pg_stat_activity WHERE usename LIKE 'tower_fence_test_%') \
         AND database = (SELECT oid FROM pg_database WHERE datname = current_database())";
    assert_eq!(db.number(seen).await, 0);
    leases.release(&sku(), &first.id).await.unwrap();
    granted(next).await;
    assert!(leases.break_lease(&sku(), None).await.unwrap());
}

#[tokio::test]
async fn other_roles_cannot_learn_the_channel_of_a_listener() {
    let db = Postgres::fresh(4).await;
    let leases = PostgresLeases::new(db.fence());
    grant(&leases, &sku(), LONG).await;
    let _waiting = wait(&leases, LONG).await;
    let listener = db.number("SELECT listener FROM tower_fence.waiters").await;
    let stranger = db.role("").await;
    let mut conn = stranger.connect().await;
    let visible = "SELECT concat((SELECT json_agg(l) FROM pg_locks AS l), (SELECT json_agg(a) FROM pg_stat_activity AS a))";
    let visible: String = read(&mut conn, visible).await;
    let halves = [listener >> 32 & 0xffff_ffff, listener & 0xffff_ffff];
    for number in [
        format!("{listener:x}"),
        listener.to_string(),
        format!("\"classid\":\"{}\",\"objid\":\"{}\"", halves[0], halves[1]),
    ] {
        assert!(!visible.contains(&number), "{number} in {visible}");
    }
}

/// A proxy to Postgres. Once `begun` is true, it sends notifications to the client as fast as it
/// can.
struct Flood {
    url: String,
    begun: Arc<AtomicBool>,
    ended: Arc<AtomicBool>,
}

impl Flood {
    fn towards(db: &Fresh<Postgres>) -> Self {
        let mut url = Url::parse(&db.url).unwrap();
        let server = format!("{}:{}", url.host_str().unwrap(), url.port().unwrap_or(5432));
        let proxy = TcpListener::bind("127.0.0.1:0").unwrap();
        url.set_host(Some("127.0.0.1")).unwrap();
        url.set_port(Some(proxy.local_addr().unwrap().port()))
            .unwrap();
        let flood = Self {
            url: format!("{url}?sslmode=disable"),
            begun: Arc::default(),
            ended: Arc::default(),
        };
        let (begun, ended) = (flood.begun.clone(), flood.ended.clone());
        thread::spawn(move || {
            for client in proxy.incoming() {
                let (client, server) = (client.unwrap(), TcpStream::connect(&server).unwrap());
                let (mut up, mut down) = (client.try_clone().unwrap(), server.try_clone().unwrap());
                thread::spawn(move || std::io::copy(&mut up, &mut down));
                let (begun, ended) = (begun.clone(), ended.clone());
                thread::spawn(move || pass_on(server, client, &begun, &ended));
            }
        });
        flood
    }
}

impl Drop for Flood {
    fn drop(&mut self) {
        self.ended.store(true, Relaxed);
    }
}

/// Forwards the messages of the server, with notifications between them.
fn pass_on(mut server: TcpStream, mut client: TcpStream, begun: &AtomicBool, ended: &AtomicBool) {
    let notification = b"A\0\0\0\x0e\0\0\0\x01channel\0x\0";
    let mut notification = notification.to_vec();
    let length = u32::try_from(notification.len() - 1).unwrap();
    notification[1..5].copy_from_slice(&length.to_be_bytes());
    let notifications = notification.repeat(4_096);
    let patience = Duration::from_millis(1);
    server.set_read_timeout(Some(patience)).unwrap();
    let mut kind = [0];
    while !ended.load(Relaxed) {
        match server.read(&mut kind) {
            Ok(1) => {
                server.set_read_timeout(None).unwrap();
                let mut length = [0; 4];
                server.read_exact(&mut length).unwrap();
                let mut rest = vec![0; u32::from_be_bytes(length) as usize - 4];
                server.read_exact(&mut rest).unwrap();
                server.set_read_timeout(Some(patience)).unwrap();
                let message = [&kind[..], &length[..], &rest[..]].concat();
                if client.write_all(&message).is_err() {
                    return;
                }
            }
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
            _ => return,
        }
        if begun.load(Relaxed) && (0..64).any(|_| client.write_all(&notifications).is_err()) {
            return;
        }
    }
}

#[tokio::test]
async fn a_flood_of_notifications_stops_no_other_request() {
    let db = Postgres::fresh(4).await;
    let flood = Flood::towards(&db);
    let (url, listens_at, begun) = (db.url.clone(), flood.url.clone(), flood.begun.clone());
    let (served, outcome) = mpsc::channel();
    // All tasks run in one thread, so a task that does not yield would block the others forever.
    thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(async {
            let pool = sqlx::PgPool::connect(&url).await.unwrap();
            let options: PgConnectOptions = listens_at.parse().unwrap();
            let leases = PostgresLeases::new(Fence::new(pool)).listen_with(options);
            let first = grant(&leases, &sku(), LONG).await;
            let waiting = wait(&leases, LONG).await;
            begun.store(true, Relaxed);
            for n in 0..100 {
                grant(&leases, &resource(&format!("other-{n}")), LONG).await;
            }
            // The notification of the waiter is one of many.
            leases.release(&sku(), &first.id).await.unwrap();
            granted(waiting).await;
            let _ = served.send(());
        });
    });
    let outcome = tokio::task::spawn_blocking(move || outcome.recv_timeout(PATIENCE));
    let outcome = outcome.await.unwrap();
    drop(flood);
    outcome.expect("requests are not served during the flood");
}

#[tokio::test]
async fn a_frozen_writer_of_one_resource_stops_no_other() {
    let db = Postgres::fresh(6).await;
    // The lock timeout is much longer than the pool timeout.
    let fence = db.fence_with(|fence| fence.lock_timeout(PATIENCE).pool_timeout(2 * SOON));
    let leases = PostgresLeases::new(fence);
    let hot = resource("hot");
    let mut writer = PgConnection::connect(&db.url).await.unwrap();
    let lease = acquire(&mut writer, "hot", "50 ms").await.unwrap();
    let mut writing = writer.begin().await.unwrap();
    admit(&mut writing, "hot", lease.token).await.unwrap();
    eventually!(
        "the lease has ended",
        leases.inspect(&hot).await.unwrap().is_none()
    );
    let crowd = (0..40).map(|_| spawn_acquire(&leases, &hot, Acquire::new(LONG)));
    let crowd: Vec<_> = crowd.collect();
    let mut observer = PgConnection::connect(&db.url).await.unwrap();
    eventually!(
        "the waiters wait for the writer",
        Postgres::number(&mut observer, WAITING_FOR_LOCK)
            .await
            .unwrap()
            > 0
    );
    // Further requests keep arriving, and their clients give up. A busy machine slows down the
    // arrivals, too.
    let mut flood = JoinSet::new();
    for _ in 0..10 {
        let (leases, hot) = (leases.clone(), hot.clone());
        flood.spawn(async move {
            loop {
                const GIVEN_UP: Duration = Duration::from_millis(30);
                let request = leases.acquire(&hot, Acquire::new(LONG));
                let _ = tokio::join!(timeout(GIVEN_UP, request), sleep(GIVEN_UP));
            }
        });
    }
    for n in 0..20 {
        let other = resource(&format!("other-{n}"));
        let lease = grant(&leases, &other, LONG).await;
        leases.release(&other, &lease.id).await.unwrap();
        let waits = crowd.iter().any(|request| !request.is_finished());
        assert!(waits, "no request waits for the writer");
    }
    flood.abort_all();
    writing.commit().await.unwrap();
    let mut tokens = 0;
    for request in crowd {
        match request.await.unwrap() {
            Ok(_) => tokens += 1,
            Err(LeaseError::Held { .. } | LeaseError::Unavailable(_)) => {}
            Err(error) => panic!("{error:?}"),
        }
    }
    if tokens == 0 {
        // A request of the flood held the lease for a moment.
        let request = Acquire::new(LONG).wait(PATIENCE);
        leases.acquire(&hot, request).await.unwrap();
        tokens = 1;
    }
    assert_eq!(tokens, 1);
}
