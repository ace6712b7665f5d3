//! `tower-fence run` does not leave a held lease behind.

use std::sync::{
    Arc, Mutex,
    atomic::{AtomicUsize, Ordering::Relaxed},
};

use serde_json::{Value, json};
use sqlx::Postgres;
use tokio::sync::watch;

use super::{
    command::{Notes, end, held, serving, start_at},
    program::{Served, program, run},
};
use crate::support::{
    database::TestDatabase,
    eventually,
    process::Process,
    proxy::{Link, Passage, Proxy, Sender},
};

/// A TTL that is long enough for the test to see a lease that was left behind.
const LONG: [&str; 2] = ["--ttl", "5m"];

fn is(message: &[u8], beginning: &str) -> bool {
    message.starts_with(beginning.as_bytes())
}

/// Returns a command that ends when the note `go` exists. Once it runs, the answer to the
/// acquisition has arrived.
fn until_it_may_go(notes: &Notes) -> String {
    notes.script("echo runs > NOTES/runs; until test -e NOTES/go; do sleep 0.02; done; exit 7")
}

#[tokio::test]
async fn a_release_is_retried_until_the_server_is_back() {
    let (_db, server) = serving(&[]).await;
    let (notes, proxy) = (Notes::new(), Proxy::to(server.addr()).await);
    let script = until_it_may_go(&notes);
    let running = start_at(&proxy.url(&server.url), "sku-1", &LONG, &script);
    notes.has("runs").await;
    proxy.set(Link::Cut);
    let before = proxy.connections();
    notes.note("go");
    // These connections are for a renewal, a release, and retries.
    eventually!("the release is retried", proxy.connections() > before + 3);
    assert!(held(&server).await);
    proxy.set(Link::Whole);
    assert_eq!(end(running).await.is(7).stderr, "");
    assert!(!held(&server).await);
}

#[tokio::test]
async fn a_release_in_the_database_itself_is_retried() {
    let db = Postgres::fresh(2).await;
    let (notes, proxy) = (Notes::new(), Proxy::to(db.addr()).await);
    let script = until_it_may_go(&notes);
    let mut command = program();
    command
        .env("TOWER_FENCE_DATABASE_URL", proxy.url(&db.url))
        .args(["run", "--direct", "--resource", "sku-1"])
        .args(LONG)
        .args(["--", "sh", "-c", &script]);
    let running = Process::run(command);
    let leases = "SELECT count(*) FROM tower_fence.held_leases";
    notes.has("runs").await;
    assert_eq!(db.number(leases).await, 1);
    proxy.set(Link::Cut);
    let before = proxy.connections();
    notes.note("go");
    eventually!("the release is retried", proxy.connections() > before + 3);
    proxy.set(Link::Whole);
    end(running).await.is(7);
    assert_eq!(db.number(leases).await, 0);
}

#[tokio::test]
async fn a_release_is_given_up_after_its_timeout() {
    let (_db, server) = serving(&[]).await;
    let (notes, proxy) = (Notes::new(), Proxy::to(server.addr()).await);
    let script = until_it_may_go(&notes);
    let options = [&LONG[..], &["--release-timeout", "1s"]].concat();
    let running = start_at(&proxy.url(&server.url), "sku-1", &options, &script);
    notes.has("runs").await;
    proxy.set(Link::Cut);
    notes.note("go");
    end(running).await.is(7).says("will expire");
}

#[tokio::test]
async fn a_signal_ends_the_retries_of_a_release() {
    let (_db, server) = serving(&[]).await;
    let (notes, proxy) = (Notes::new(), Proxy::to(server.addr()).await);
    let script = until_it_may_go(&notes);
    let options = [&LONG[..], &["--release-timeout", "5m"]].concat();
    let running = start_at(&proxy.url(&server.url), "sku-1", &options, &script);
    notes.has("runs").await;
    proxy.set(Link::Cut);
    let before = proxy.connections();
    notes.note("go");
    eventually!("the release is retried", proxy.connections() > before + 3);
    running.signal("-TERM");
    end(running).await.is(7).says("will expire");
}

/// The server has executed the release, and a proxy answers with an error or closes the connection.
#[tokio::test]
async fn a_release_whose_answer_is_lost_is_a_success() {
    let (_db, server) = serving(&[]).await;
    let unavailable = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n".to_vec();
    for passage in [Passage::Instead(unavailable), Passage::CutAfter(0)] {
        let proxy = Proxy::judging(server.addr(), move |_, message| {
            passage.clone().when(is(message, "HTTP/1.1 204"))
        })
        .await;
        let running = start_at(&proxy.url(&server.url), "sku-1", &LONG, "exit 7");
        end(running).await.is(7);
        assert!(!held(&server).await);
    }
}

/// A proxy repeats the release, because it did not receive the first answer.
#[tokio::test]
async fn a_release_that_a_proxy_repeats_is_a_success() {
    let (_db, server) = serving(&[]).await;
    let proxy = Proxy::judging(server.addr(), |sender, message| {
        let text = String::from_utf8_lossy(message);
        match sender {
            Sender::Client if is(message, "DELETE ") => Passage::Instead(message.repeat(2)),
            Sender::Server if is(message, "HTTP/1.1 204") => match text.find("HTTP/1.1 409") {
                Some(second) => Passage::Instead(message[second..].to_vec()),
                None => Passage::Dropped,
            },
            _ => Passage::Whole,
        }
    })
    .await;
    let running = start_at(&proxy.url(&server.url), "sku-1", &LONG, "exit 7");
    end(running).await.is(7);
    assert!(!held(&server).await);
}

#[tokio::test]
async fn a_signal_during_the_acquire_leaves_no_lease() {
    let (_db, server) = serving(&[]).await;
    for (signal, status) in [("-TERM", 143), ("-INT", 130)] {
        let (_hold, held_back) = watch::channel(true);
        let proxy = Proxy::judging(server.addr(), move |_, message| {
            Passage::Held(held_back.clone()).when(is(message, "HTTP/1.1 201"))
        })
        .await;
        let url = proxy.url(&server.url);
        let running = start_at(&url, "sku-1", &LONG, "echo never");
        eventually!("the lease is held", held(&server).await);
        running.signal(signal);
        assert_eq!(end(running).await.is(status).stdout, "");
        assert!(!held(&server).await, "{signal}");
    }
}

/// Starts a proxy that loses this number of answers to requests for a lease.
async fn losing(server: &Served, answers: usize) -> Proxy {
    let lost = Arc::<AtomicUsize>::default();
    Proxy::judging(server.addr(), move |_, message| {
        let loses = is(message, "HTTP/1.1 201") && lost.fetch_add(1, Relaxed) < answers;
        Passage::CutAfter(0).when(loses)
    })
    .await
}

#[tokio::test]
async fn a_lost_answer_to_the_acquire_leaves_no_lease() {
    let (_db, server) = serving(&[]).await;
    // The retry finds the lease.
    let proxy = losing(&server, 1).await;
    let running = start_at(&proxy.url(&server.url), "sku-1", &LONG, "echo got");
    assert_eq!(end(running).await.is(0).stdout, "got\n");
    assert!(!held(&server).await);

    let proxy = losing(&server, usize::MAX).await;
    let running = start_at(&proxy.url(&server.url), "sku-1", &LONG, "echo never");
    assert_eq!(end(running).await.is(69).stdout, "");
    assert!(!held(&server).await);
}

/// A proxy decodes the path and removes its dots.
#[tokio::test]
async fn a_lease_on_another_resource_is_released() {
    let (_db, server) = serving(&[]).await;
    // If the proxy rewrites each request, the first one shows it. Otherwise a lease is granted.
    for method in ["", "POST "] {
        let proxy = Proxy::judging(server.addr(), move |_, message| {
            let text = String::from_utf8_lossy(message);
            let rewritten = text.replace("/a%2F..%2Fsku-1", "/sku-1");
            Passage::Instead(rewritten.into_bytes()).when(text.starts_with(method))
        })
        .await;
        let url = proxy.url(&server.url);
        let line = format!("run --url {url} --resource a/../sku-1 --wait 1h true");
        let refused = run(&Vec::from_iter(line.split(' ')), &[]).await;
        refused
            .is(78)
            .says("check whether a proxy rewrites the request path");
        assert!(!held(&server).await);
    }
}

/// Each request of a long wait has the same lease id, so all of them share one position in the
/// queue.
#[tokio::test]
async fn one_wait_has_one_lease_id() {
    let (_db, server) = serving(&["--max-wait", "500ms"]).await;
    let asked = Arc::<Mutex<Vec<String>>>::default();
    let heard = Arc::clone(&asked);
    let proxy = Proxy::judging(server.addr(), move |_, message| {
        let text = String::from_utf8_lossy(message);
        let body = text.split_once("\r\n\r\n").map_or("", |(_, body)| body);
        if let Ok(body) = serde_json::from_str::<Value>(body)
            && text.starts_with("POST ")
        {
            let id = body["lease_id"].as_str().unwrap().to_owned();
            heard.lock().unwrap().push(id);
        }
        Passage::Whole
    })
    .await;
    server.post("/locks/sku-1", &json!({"ttl_ms": 4_000})).await;
    let url = proxy.url(&server.url);
    let waiting = start_at(&url, "sku-1", &["--wait", "1h"], "echo got");
    assert_eq!(end(waiting).await.is(0).stdout, "got\n");
    let mut asked = asked.lock().unwrap();
    assert!(asked.len() > 2, "the request was not repeated: {asked:?}");
    asked.dedup();
    assert_eq!(asked.len(), 1);
}
