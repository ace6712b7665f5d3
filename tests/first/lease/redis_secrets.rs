//! Redis reveals no lease id to a reader of its data or to an observer of its commands. Leases of
//! version 0.2, which stored their ids, are lost.

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};
use tower_fence::lease::{Acquire, LeaseAdmin, LeaseId, Leases, Renew};

use crate::support::{
    lease::{LONG, SHORT, granted, is_held, is_lost, join, next_grant, sku},
    redis::{LEASE, RedisServer, with_leases},
};

/// A monitor of all commands of a server, including those of scripts.
struct Monitor(TcpStream);

impl Monitor {
    async fn start(server: &RedisServer) -> Self {
        let mut stream = TcpStream::connect(server.addr()).await.unwrap();
        stream.write_all(b"MONITOR\r\n").await.unwrap();
        let mut ok = [0; 5];
        stream.read_exact(&mut ok).await.unwrap();
        assert_eq!(&ok, b"+OK\r\n");
        Self(stream)
    }

    /// Returns the commands that the server ran before this word was sent to it.
    async fn until(mut self, server: &RedisServer, word: &str) -> String {
        server.command(&["ECHO", word]).await;
        let mut heard = Vec::new();
        while !String::from_utf8_lossy(&heard).contains(word) {
            assert_ne!(self.0.read_buf(&mut heard).await.unwrap(), 0);
        }
        String::from_utf8(heard).unwrap()
    }
}

/// Returns the stored value of the lease, and the stored part of its lease id.
async fn stored(server: &RedisServer) -> (String, String) {
    let value: String = server.read(&format!("GET {LEASE}")).await;
    let id = value.split(':').nth(2).unwrap().to_owned();
    (value, id)
}

#[tokio::test]
async fn redis_receives_and_stores_no_lease_id() {
    let (server, _db, leases) = with_leases().await;
    let monitor = Monitor::start(&server).await;
    let ids: Vec<LeaseId> = (0..3).map(|_| LeaseId::random()).collect();
    let request = |at: usize| Acquire::new(LONG).lease_id(ids[at].clone()).wait(LONG);
    leases.acquire(&sku(), request(0)).await.unwrap();
    let (_, found) = stored(&server).await;
    let waiting = join(&leases, request(1)).await;
    let gone = join(&leases, request(2)).await;
    gone.abort();
    let renew = Renew::new(LONG).with_new_token();
    leases.renew(&sku(), &ids[0], renew).await.unwrap();
    leases.release(&sku(), &ids[0]).await.unwrap();
    assert_eq!(granted(waiting).await.id, ids[1]);
    assert!(leases.break_lease(&sku(), None).await.unwrap());

    let heard = monitor.until(&server, "enough").await;
    // The monitor saw the stored form of the lease id, and the key of the lease.
    assert!(heard.contains(&found) && heard.contains(LEASE), "{heard}");
    for id in &ids {
        assert!(!heard.contains(id.expose()), "{heard}");
    }
    // The stored id cannot be used as a lease id, with or without its mark.
    assert!(LeaseId::new(found.as_str()).is_err());
    leases.acquire(&sku(), request(0)).await.unwrap();
    let digits = LeaseId::new(found.trim_start_matches('#')).unwrap();
    is_lost(leases.renew(&sku(), &digits, Renew::new(LONG)).await);
    is_lost(leases.release(&sku(), &digits).await);
    leases.release(&sku(), &ids[0]).await.unwrap();
}

/// The lease may have been granted before an upgrade, or by a process that is not upgraded yet.
#[tokio::test]
async fn lease_of_version_0_2_is_lost_to_every_client() {
    let (server, _db, leases) = with_leases().await;
    let id = LeaseId::random();
    let request = Acquire::new(LONG).lease_id(id.clone());
    let old = leases.acquire(&sku(), request.clone()).await.unwrap();
    let (value, found) = stored(&server).await;
    let plain = value.replace(&found, id.expose());
    server.command(&["SET", LEASE, &plain, "PX", "600"]).await;

    is_lost(leases.renew(&sku(), &id, Renew::new(LONG)).await);
    is_lost(leases.release(&sku(), &id).await);
    for request in [request, Acquire::new(LONG)] {
        is_held(leases.acquire(&sku(), request).await);
    }
    let held = leases.inspect(&sku()).await.unwrap().unwrap();
    assert_eq!(held.token, old.token);
    // The lease expires.
    assert!(next_grant(&leases, SHORT).await.token > old.token);
}
