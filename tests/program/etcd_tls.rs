//! etcd over TLS, with the client of the application.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    time::Duration,
};

use sqlx::Sqlite;
use tower_fence::lease::{Acquire, LeaseError, Leases};
use tower_fence_etcd::EtcdLeasesBuilder;

use crate::support::{
    certificates::Certificates,
    database::{Fresh, TestDatabase},
    etcd::EtcdCluster,
    lease::{LONG, grant, granted, join, messages_of, sku},
    proxy::{Passage, Proxy, contains},
};

fn builder(db: &Fresh<Sqlite>) -> EtcdLeasesBuilder {
    EtcdLeasesBuilder::new(db.fence()).call_timeout(Duration::from_secs(5))
}

/// Returns a proxy in front of the cluster, its URL, and whether the proxy has seen this text.
async fn overheard(cluster: &EtcdCluster, text: &'static str) -> (Proxy, String, Arc<AtomicBool>) {
    let seen = Arc::new(AtomicBool::new(false));
    let proxy = Proxy::judging(cluster.addr(), {
        let seen = Arc::clone(&seen);
        move |_, message| {
            seen.fetch_or(contains(message, text), SeqCst);
            Passage::Whole
        }
    })
    .await;
    let url = proxy.url(&cluster.urls()[0]);
    (proxy, url, seen)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leases_queues_and_passwords_use_tls() {
    let (certificates, db) = (Certificates::make(), Sqlite::fresh(2).await);
    let secure = EtcdCluster::start_with_tls(&certificates).await;
    let plain = EtcdCluster::start(1).await;
    for (cluster, is_readable) in [(&secure, false), (&plain, true)] {
        cluster.add_user("locks", "p4ssw0rd").await;
        let (_proxy, url, seen) = overheard(cluster, "p4ssw0rd").await;
        let settings = || builder(&db).client(certificates.client());
        let leases = settings().user("locks", "p4ssw0rd").connect(&[&url]).await;
        let leases = leases.unwrap();
        let first = grant(&leases, &sku(), LONG).await;
        let waiting = join(&leases, Acquire::new(LONG).wait(LONG)).await;
        leases.release(&sku(), &first.id).await.unwrap();
        let next = granted(waiting).await;
        assert!(next.token > first.token);
        leases.release(&sku(), &next.id).await.unwrap();
        assert_eq!(seen.load(SeqCst), is_readable, "{url}");

        let wrong = settings().user("locks", "another").connect(&[&url]).await;
        let messages = messages_of(&wrong.unwrap_err());
        assert_contains!(messages, "authentication failed");
        assert!(!messages.contains("another"), "{messages}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn untrusted_server_receives_no_password() {
    let (certificates, db) = (Certificates::make(), Sqlite::fresh(2).await);
    let cluster = EtcdCluster::start_with_tls(&certificates).await;
    let address = cluster.addr().to_string();
    // The first client trusts the authorities of the system. The second one trusts another
    // authority of the same name.
    let settings = || builder(&db).call_timeout(Duration::from_secs(1));
    for builder in [settings(), settings().client(Certificates::make().client())] {
        let builder = builder.user("locks", "p4ssw0rd");
        let refused = builder.connect(&cluster.urls()).await.unwrap_err();
        assert_matches!(refused, LeaseError::Unavailable(_));
        let messages = messages_of(&refused);
        assert_contains!(messages, &address);
        assert_contains!(messages, "certificate");
        assert!(!messages.contains("p4ssw0rd"), "{messages}");
    }
    // Without TLS, the server does not answer like etcd.
    let plain = format!("http://{address}");
    let refused = settings().connect(&[plain]).await.unwrap_err();
    assert!(messages_of(&refused).contains(&address), "{refused:?}");
}
