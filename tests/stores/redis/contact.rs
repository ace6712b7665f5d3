//! A Redis that is not running yet, and the texts of errors.

use std::{error::Error, time::Duration};

use redis::sentinel::{SentinelClient, SentinelServerType};
use sqlx::Sqlite;
use tokio::net::TcpListener;
use tower_fence::{
    Resource,
    epochs::{Epoch, EpochError, EpochFuture, Epochs, SourceId},
    lease::{Acquire, LeaseAdmin, LeaseError, Leases, RedisLeases},
};

use crate::support::{
    database::TestDatabase,
    proxy::{Link, Proxy},
    redis::{RedisServer, fresh_prefix, shared_url},
};

const LONG: Duration = Duration::from_secs(60);

fn sku() -> Resource {
    Resource::new("sku-1").unwrap()
}

/// Returns a port without a listener.
async fn closed_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    listener.local_addr().unwrap().port()
}

/// Returns all texts of an error, for people and for logs.
fn all_texts(error: &LeaseError) -> String {
    let mut texts = format!("{error}\n{error:?}");
    let mut cause: Option<&dyn Error> = error.source();
    while let Some(error) = cause {
        texts += &format!("\n{error}\n{error:?}");
        cause = error.source();
    }
    texts
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
        let texts = all_texts(&error);
        assert!(texts.contains(&address), "{texts}");
        assert!(!texts.contains("open-sesame"), "{texts}");
    }
    // The error does not repeat an invalid Redis URL either.
    for url in [
        "http://alice:open-sesame@127.0.0.1",
        "redis://alice:open-sesame@127.0.0.1:port",
    ] {
        for refused in [
            builder().connect_lazy(url).unwrap_err(),
            builder().with_cluster(&[url], |client| client).unwrap_err(),
        ] {
            assert!(matches!(refused, LeaseError::Misconfigured(_)));
            let texts = all_texts(&refused);
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
    SentinelClient::build(vec![url], "main".to_owned(), None, master).unwrap()
}

/// A lazy store needs no runtime, no server, and no database.
#[test]
fn a_lazy_store_is_built_outside_of_a_runtime() {
    struct NoEpochs;

    impl Epochs for NoEpochs {
        fn next_epoch(&self, _: u8, _: Epoch) -> EpochFuture<'_> {
            Box::pin(async { Err(EpochError::Exhausted) })
        }

        fn report_epoch(&self, _: u8, _: Epoch) -> EpochFuture<'_> {
            Box::pin(async { Err(EpochError::Exhausted) })
        }

        fn source_id(&self) -> EpochFuture<'_, SourceId> {
            Box::pin(async { Err(EpochError::Exhausted) })
        }
    }

    let (url, builder) = ("redis://127.0.0.1:1", || RedisLeases::builder(NoEpochs));
    builder().connect_lazy(url).unwrap();
    builder().with_sentinels(sentinels(url), 0, "main").unwrap();
    builder().with_cluster(&[url], |client| client).unwrap();
    // Invalid settings are reported immediately.
    let refused = builder().key_prefix("{").connect_lazy(url);
    assert!(matches!(refused, Err(LeaseError::Invalid { .. })));
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
}

/// Creates a user with these rights, and returns its URL.
async fn user(redis: &RedisServer, name: &str, rights: &str) -> String {
    let set_user = format!("ACL SETUSER {name} on >open-sesame ~* &* {rights}");
    redis
        .command(&set_user.split(' ').collect::<Vec<_>>())
        .await;
    let login = format!("redis://{name}:open-sesame@");
    redis.url().replace("redis://", &login)
}

fn is_misconfigured<T>(outcome: Result<T, LeaseError>) {
    let error = outcome.err();
    assert!(
        matches!(error, Some(LeaseError::Misconfigured(_))),
        "{error:?}"
    );
}

/// The first contact checks the rights on channels, and everything else that `connect` checks.
#[tokio::test]
async fn a_lazy_store_checks_the_server_at_the_first_contact() {
    let db = Sqlite::fresh(4).await;
    let redis = RedisServer::start(&[]).await;
    let user = [
        "ACL",
        "SETUSER",
        "mute",
        "on",
        ">open-sesame",
        "~*",
        "+@all",
    ];
    redis.command(&user).await;
    redis
        .command(&["ACL", "SETUSER", "mute", "resetchannels"])
        .await;
    let url = redis.url().replace("redis://", "redis://mute:open-sesame@");
    let eager = RedisLeases::connect(&url, db.fence()).await.unwrap_err();
    let leases = RedisLeases::connect_lazy(&url, db.fence()).unwrap();
    let lazy = leases.acquire(&sku(), Acquire::new(LONG)).await;
    for texts in [all_texts(&eager), all_texts(&lazy.unwrap_err())] {
        assert!(texts.contains("channels"), "{texts}");
        assert!(!texts.contains("open-sesame"), "{texts}");
    }
    // Once the user has the right, the same store continues.
    let rights = ["ACL", "SETUSER", "mute", "&tower-fence:*"];
    redis.command(&rights).await;
    leases.acquire(&sku(), Acquire::new(LONG)).await.unwrap();
}
