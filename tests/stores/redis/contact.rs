//! A Redis that is not running yet, clients that the application has created, and the texts of
//! errors.

use std::time::Duration;

use redis::{
    Client,
    sentinel::{SentinelClient, SentinelServerType},
};
use sqlx::Sqlite;
use tokio::net::TcpListener;
use tower_fence::lease::{
    Acquire, LeaseAdmin, LeaseError, Leases, RedisLeases, conformance::CountedEpochs,
};

use crate::support::{
    database::TestDatabase,
    eventually,
    lease::{
        LONG, grant, granted, is_misconfigured, is_unavailable, messages_of, sku, spawn_acquire,
        wait,
    },
    log::Log,
    proxy::{Link, Proxy},
    redis::{RedisServer, fresh_prefix, shared_url},
};

/// Returns a port without a listener.
async fn closed_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    listener.local_addr().unwrap().port()
}

#[tokio::test]
async fn a_store_is_built_before_its_server_answers() {
    let db = Sqlite::fresh(4).await;
    let redis = shared_url().replace("redis://", "").parse().unwrap();
    let proxy = Proxy::to(redis).await;
    proxy.set(Link::Cut);
    let leases = RedisLeases::builder(db.fence())
        .key_prefix(fresh_prefix())
        .connect_lazy(&format!("redis://{}", proxy.addr))
        .unwrap();
    let refused = leases.acquire(&sku(), Acquire::new(LONG)).await;
    assert!(matches!(refused, Err(LeaseError::Unavailable(_))));
    leases.inspect(&sku()).await.unwrap_err();
    leases.list(10, None).await.unwrap_err();

    // From here on the server is running, and the same store continues.
    proxy.set(Link::Whole);
    let lease = leases.acquire(&sku(), Acquire::new(LONG)).await.unwrap();
    leases.release(&sku(), &lease.id).await.unwrap();
}

#[tokio::test]
async fn an_error_names_the_address_and_never_the_password() {
    let db = Sqlite::fresh(4).await;
    let port = closed_port().await;
    let address = format!("127.0.0.1:{port}");
    let url = format!("redis://alice:open-sesame@{address}");
    let builder = || RedisLeases::builder(db.fence()).command_timeout(Duration::from_millis(500));
    for error in [
        RedisLeases::connect(&url, db.fence()).await.unwrap_err(),
        first_contact(builder().with_cluster(&[&url], |client| client)).await,
        first_contact(builder().with_sentinels(sentinels(&url), 0, &address)).await,
        first_contact(builder().connect_lazy(&url)).await,
    ] {
        let texts = messages_of(&error);
        assert_contains!(texts, &address);
        assert!(!texts.contains("open-sesame"), "{texts}");
    }
    // The error does not repeat an invalid Redis URL either.
    let address = "alice:open-sesame@127.0.0.1";
    for url in [
        format!("http://{address}"),
        format!("redis://{address}:port"),
    ] {
        for refused in [
            builder().connect_lazy(&url).unwrap_err(),
            builder()
                .with_cluster(&[&url], |client| client)
                .unwrap_err(),
        ] {
            assert_matches!(refused, LeaseError::Misconfigured(_));
            let texts = messages_of(&refused);
            assert!(!texts.contains("open-sesame"), "{texts}");
        }
    }
}

/// Returns the error of the first call.
async fn first_contact(leases: Result<RedisLeases, LeaseError>) -> LeaseError {
    leases.unwrap().inspect(&sku()).await.unwrap_err()
}

fn sentinels(url: &str) -> SentinelClient {
    let master = SentinelServerType::Master;
    SentinelClient::build(vec![url], String::from("main"), None, master).unwrap()
}

/// A lazy store needs no runtime, no server, and no database.
#[test]
fn a_lazy_store_is_built_outside_of_a_runtime() {
    let url = "redis://127.0.0.1:1";
    let builder = || RedisLeases::builder(CountedEpochs::default());
    builder().connect_lazy(url).unwrap();
    builder().with_sentinels(sentinels(url), 0, "main").unwrap();
    builder().with_cluster(&[url], |client| client).unwrap();
    // Invalid settings are reported immediately. A brace in the prefix would break the hash tag.
    // The keys of the prefix `a` would include those of `a:b`. Two issuers whose prefixes look the
    // same would grant the same resource twice.
    let invalid = [
        "",
        "a{b}c",
        "{",
        "a b",
        "a\n",
        "a:b",
        "a*",
        "a\u{200b}",
        "é",
    ];
    for prefix in invalid {
        let refused = builder().key_prefix(prefix).connect_lazy(url);
        assert_matches!(&refused, Err(LeaseError::Invalid { field, .. }) if field == "key_prefix");
    }
    builder().key_prefix("Az.0_9-").connect_lazy(url).unwrap();
    builder().connect_lazy("localhost").unwrap_err();
}

#[tokio::test]
async fn missing_right_is_a_misconfiguration() {
    let db = Sqlite::fresh(4).await;
    let redis = RedisServer::start(&[]).await;
    let url = user(&redis, "reader", "+@read +@connection").await;
    let leases = RedisLeases::connect_lazy(&url, db.fence()).unwrap();
    is_misconfigured(RedisLeases::connect(&url, db.fence()).await);
    is_misconfigured(leases.acquire(&sku(), Acquire::new(LONG)).await);
    // This user may run scripts, but not every command of the scripts.
    let url = user(&redis, "runner", "+@all -set").await;
    let leases = RedisLeases::connect(&url, db.fence()).await.unwrap();
    is_misconfigured(leases.acquire(&sku(), Acquire::new(LONG)).await);
    let url = user(&redis, "settled", "+@all -select").await;
    is_misconfigured(RedisLeases::connect(&format!("{url}/3"), db.fence()).await);
}

#[tokio::test]
async fn missing_password_is_a_misconfiguration() {
    let db = Sqlite::fresh(4).await;
    let redis = RedisServer::start(&["--requirepass", "sesame"]).await;
    is_misconfigured(RedisLeases::connect(&redis.url(), db.fence()).await);
    // A refused login may be temporary.
    let wrong = redis.url().replace("//", "//:open@");
    is_unavailable(RedisLeases::connect(&wrong, db.fence()).await);
    let cluster = RedisLeases::builder(db.fence());
    let cluster = cluster.with_cluster(&[&redis.url()], |client| client);
    is_misconfigured(cluster.unwrap().inspect(&sku()).await);
}

#[tokio::test]
async fn unknown_command_or_database_is_a_misconfiguration() {
    let db = Sqlite::fresh(4).await;
    for command in ["EVALSHA", "HSET"] {
        let redis = RedisServer::start(&["--rename-command", command, ""]).await;
        let leases = RedisLeases::connect_lazy(&redis.url(), db.fence()).unwrap();
        is_misconfigured(leases.acquire(&sku(), Acquire::new(LONG)).await);
    }
    let redis = RedisServer::start(&["--databases", "1"]).await;
    let url = format!("{}/7", redis.url().trim_end_matches('/'));
    is_misconfigured(RedisLeases::connect(&url, db.fence()).await);
}

/// Creates a user with these rights, and returns its URL.
async fn user(redis: &RedisServer, name: &str, rights: &str) -> String {
    let set_user = format!("ACL SETUSER {name} on >open-sesame ~* &* {rights}");
    redis.send(&set_user).await;
    let login = format!("redis://{name}:open-sesame@");
    redis.url().replace("redis://", &login)
}

/// The first contact checks the rights on channels, and everything else that `connect` checks.
#[tokio::test]
async fn missing_channel_rights_are_reported_at_the_first_contact() {
    let db = Sqlite::fresh(4).await;
    let redis = RedisServer::start(&[]).await;
    let url = user(&redis, "mute", "resetchannels +@all").await;
    let eager = RedisLeases::connect(&url, db.fence()).await.unwrap_err();
    let leases = RedisLeases::connect_lazy(&url, db.fence()).unwrap();
    let lazy = leases.acquire(&sku(), Acquire::new(LONG)).await;
    for refused in [eager, lazy.unwrap_err()] {
        let texts = messages_of(&refused);
        assert!(matches!(refused, LeaseError::Misconfigured(_)), "{texts}");
        assert_contains!(texts, "channels");
        assert_contains!(texts, "PUBLISH and SUBSCRIBE on `tower-fence:*`");
        assert!(!texts.contains("open-sesame"), "{texts}");
    }
    // The user may publish, but not subscribe.
    redis.send("ACL SETUSER mute allchannels -subscribe").await;
    RedisLeases::connect(&url, db.fence()).await.unwrap_err();
    let whole = "ACL SETUSER mute +subscribe resetchannels &tower-fence:*";
    redis.send(whole).await;
    RedisLeases::connect(&url, db.fence()).await.unwrap();
    // Once the user has the rights, the same store continues.
    leases.acquire(&sku(), Acquire::new(LONG)).await.unwrap();
}

#[tokio::test]
async fn refused_subscription_is_logged() {
    let (log, _guard) = Log::of_this_thread("tower_fence=warn");
    let (redis, db) = (RedisServer::start(&[]).await, Sqlite::fresh(2).await);
    let url = user(&redis, "locks", "+@all").await;
    let leases = RedisLeases::connect(&url, db.fence()).await.unwrap();
    let first = grant(&leases, &sku(), LONG).await;
    redis.send("ACL SETUSER locks -subscribe").await;
    let waiting = spawn_acquire(&leases, &sku(), Acquire::new(LONG).wait(LONG));
    eventually!("the refusal is logged", log.text().contains("subscribe"));
    assert_contains!(log.text(), "cannot receive notifications");
    leases.release(&sku(), &first.id).await.unwrap();
    granted(waiting).await;
}

#[tokio::test]
async fn client_with_a_password_is_used() {
    let (redis, db) = (RedisServer::start(&[]).await, Sqlite::fresh(2).await);
    redis.send("CONFIG SET requirepass s3cret").await;
    let client = Client::open(format!("redis://:s3cret@{}", redis.addr())).unwrap();
    let leases = RedisLeases::builder(db.fence())
        .with_client(client)
        .unwrap();
    let first = grant(&leases, &sku(), LONG).await;
    let waiting = wait(&leases, LONG).await;
    leases.release(&sku(), &first.id).await.unwrap();
    granted(waiting).await;
}
