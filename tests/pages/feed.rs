//! The event feed of a process, without a browser.

use std::{collections::VecDeque, time::Duration};

use reqwest::Response;
use serde_json::{Value, json};
use tokio::{io::AsyncWriteExt, net::TcpStream, time::timeout};

use tower_fence::problem::ProblemType;

use super::service::Example;
use crate::support::{
    database::{TestDatabase, on_both_databases},
    eventually,
    http::Answer,
};

/// A page that follows the feed.
struct Reader {
    response: Response,
    text: String,
    messages: VecDeque<Value>,
    last_id: String,
}

impl Reader {
    async fn of(example: &Example, after: &str) -> Self {
        let url = example.service.url("/console/api/events");
        let request = example.client.get(url).header("Last-Event-ID", after);
        let response = request.send().await.unwrap();
        assert_eq!(response.status(), 200);
        assert_eq!(response.headers()["content-type"], "text/event-stream");
        Self {
            response,
            text: String::new(),
            messages: VecDeque::new(),
            last_id: String::new(),
        }
    }

    /// Returns the next message, or `None` after the end message of the stream.
    async fn next(&mut self) -> Option<Value> {
        loop {
            if let Some(message) = self.messages.pop_front() {
                return Some(message);
            }
            let wait = timeout(Duration::from_secs(20), self.response.chunk());
            let chunk = wait
                .await
                .expect("no message within the timeout")
                .unwrap()?;
            self.text.push_str(std::str::from_utf8(&chunk).unwrap());
            while let Some((message, rest)) = self.text.split_once("\n\n") {
                if message.contains("event: end") {
                    // A browser ignores a message without data.
                    assert_contains!(message, "data: ");
                    return None;
                }
                for line in message.lines() {
                    if let Some(data) = line.strip_prefix("data: ") {
                        self.messages.push_back(serde_json::from_str(data).unwrap());
                    } else if let Some(id) = line.strip_prefix("id: ") {
                        self.last_id = id.to_owned();
                    }
                }
                self.text = rest.to_owned();
            }
        }
    }

    /// Reads until there are at least `count` events, and returns them.
    async fn events(&mut self, count: usize) -> Vec<Value> {
        let mut events = vec![];
        while events.len() < count {
            let message = self.next().await.expect("the event stream ended");
            events.extend(message["events"].as_array().unwrap().clone());
        }
        events
    }
}

fn kinds(events: &[Value]) -> Vec<&str> {
    events
        .iter()
        .map(|event| event["kind"].as_str().unwrap())
        .collect()
}

on_both_databases!(events_arrive_in_order_with_their_explanation);

async fn events_arrive_in_order_with_their_explanation<DB: TestDatabase>() {
    let example = Example::over::<DB>().await;
    let mut reader = Reader::of(&example, "").await;
    let hello = reader.next().await.unwrap()["hello"].clone();
    let process = hello["process"].as_str().unwrap();
    assert!(process.contains("inventory") && process.contains(&example.service.id().to_string()));
    assert_eq!(hello["goes_on"], false);

    let (first, second) = example.late_holder("sku-1").await;
    example.refuses(&first, 1, 412, "stale-token").await;
    assert_eq!(example.write(&second, 9).await.status, 200);
    let wait = json!({ "owner": "worker-c", "wait_ms": 20_000 });
    let waiting = tokio::spawn(Answer::to(example.ask("sku-1", wait)));
    let received = reader.events(6).await;
    assert_eq!(
        kinds(&received),
        [
            "granted", "broken", "granted", "stale", "admitted", "waiting"
        ]
    );
    assert_eq!(received[5]["owner"], "worker-c");
    // The issuer counts only a request that takes at least 20 ms as having waited.
    tokio::time::sleep(Duration::from_millis(30)).await;
    example.release(&second).await;
    assert_eq!(waiting.await.unwrap().status, 201);
    let handed_over = reader.events(2).await;
    let mut of_both = kinds(&handed_over);
    of_both.sort_unstable();
    assert_eq!(of_both, ["granted", "released"]);
    let grant = handed_over
        .iter()
        .find(|event| event["kind"] == "granted")
        .unwrap();
    assert_eq!(grant["owner"], "worker-c");
    assert!(grant["waited_ms"].as_u64().is_some());

    // A repeated release does not mean that a holder has lost its lease.
    let again = example.client.delete(example.lock("sku-1"));
    let again = again.header("Lease-Id", second["lease_id"].as_str().unwrap());
    Answer::to(again).await.is_problem(409, "lease-lost");
    let refused = reader.events(1).await;
    assert_eq!(kinds(&refused), ["refused"]);
    assert_eq!(refused[0]["problem"], "lease-lost");

    let [grant, stale] = [&received[2], &received[3]];
    assert_eq!(
        (&grant["owner"], &grant["waited_ms"]),
        (&json!("worker-b"), &Value::Null)
    );
    assert_eq!(stale["token"], first["token"]);
    assert_eq!(stale["max_token"], second["token"].as_i64().unwrap() - 1);
    let ids: Vec<_> = received
        .iter()
        .map(|event| event["id"].as_u64().unwrap())
        .collect();
    assert!(ids.is_sorted());
    for event in received {
        assert!(
            !event
                .to_string()
                .contains(first["lease_id"].as_str().unwrap())
        );
    }
}

#[tokio::test]
async fn forged_token_is_reported() {
    let secret = "k1:".to_owned() + &"0123456789abcdef".repeat(4);
    let example = Example::with(&[("TOKEN_KEY", &secret)]).await;
    let mut reader = Reader::of(&example, "").await;
    let refused = example.write_with("sku-1", "7;resource=\"sku-1\"", 1).await;
    refused.is_problem(403, "forged-token");
    let events = reader.events(1).await;
    assert_eq!(
        (&events[0]["kind"], &events[0]["token"]),
        (&json!("forged"), &json!(7))
    );
}

#[tokio::test]
async fn reader_resumes_at_its_position_and_sees_process_changes() {
    let example = Example::start().await;
    let mut reader = Reader::of(&example, "").await;
    example.acquire("a", "", 60_000).await;
    assert_eq!(reader.events(1).await[0]["resource"], "a");
    let id = reader.last_id.clone();
    drop(reader);
    example.acquire("b", "", 60_000).await;
    let again = Reader::of(&example, &id).await.next().await.unwrap();
    assert_eq!(again["hello"]["goes_on"], true);
    assert_eq!(again["events"].as_array().unwrap().len(), 1);
    assert_eq!(again["events"][0]["resource"], "b");
    for of_another in ["1-7", "x", ""] {
        let first = Reader::of(&example, of_another).await.next().await.unwrap();
        assert_eq!(first["hello"]["goes_on"], false);
        assert_eq!(first["events"].as_array().unwrap().len(), 2);
    }
    // The first message contains all counts.
    let first = Reader::of(&example, "").await.next().await.unwrap();
    let granted = first["hello"]["kinds"]
        .as_array()
        .unwrap()
        .iter()
        .position(|kind| kind == "granted");
    let seconds = first["seconds"].as_array().unwrap().iter();
    let counts = seconds.map(|second| second[1][granted.unwrap()].as_u64().unwrap());
    assert_eq!(counts.sum::<u64>(), 2);
}

/// Requests the feed, and never reads the response.
async fn stalled(example: &Example) -> TcpStream {
    let addr = example.service.url.strip_prefix("http://").unwrap();
    let mut stream = TcpStream::connect(addr).await.unwrap();
    let request = format!("GET /console/api/events HTTP/1.1\r\nHost: {addr}\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    stream
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stalled_reader_delays_no_other_and_gaps_are_reported() {
    let example = Example::start().await;
    let mut reader = Reader::of(&example, "").await;
    reader.next().await.unwrap();
    let stalled = [stalled(&example).await, stalled(&example).await];
    let (first, _second) = example.late_holder("sku-1").await;
    for _ in 0..2_000 {
        let wait = timeout(Duration::from_secs(20), example.write(&first, 1));
        wait.await
            .expect("a write waits for a reader")
            .is_problem(412, "stale-token");
    }
    let after = reader.last_id.clone();
    drop(reader);
    let late = Reader::of(&example, &after).await.next().await.unwrap();
    let (events, missed) = (
        late["events"].as_array().unwrap().len(),
        late["missed"].as_u64().unwrap(),
    );
    assert_eq!(events as u64 + missed, 2_003);
    assert!(events <= 256, "{events}");
    drop(stalled);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readers_are_limited_and_stalled_ones_are_closed() {
    let example = Example::start().await;
    let url = example.service.url("/console/api/events");
    let mut all = vec![];
    let refused = loop {
        for _ in 0..32 {
            all.push(stalled(&example).await);
        }
        let response = example.client.get(&url).send().await.unwrap();
        if response.status() != 200 {
            break response;
        }
        // On a slow machine, the first readers may have lost their slots already.
        assert!(all.len() < 640, "readers are not bounded");
    };
    assert_eq!(refused.status(), 503);
    assert!(refused.headers().contains_key("retry-after"));
    let problem: Value = refused.json().await.unwrap();
    assert_eq!(problem["type"], ProblemType::TooManyWaiters.uri());
    eventually("a reader slot is free", async || {
        let response = example.client.get(&url).send().await.unwrap();
        response.status() == 200
    })
    .await;
    drop(all);
}

#[tokio::test]
async fn graceful_stop_ends_open_event_streams() {
    let mut example = Example::start().await;
    let mut reader = Reader::of(&example, "").await;
    reader.next().await.unwrap();
    example.service.signal("-TERM");
    while reader.next().await.is_some() {}
    assert!(example.service.exit().await.success());
    assert!(
        !example.service.log().contains("did not finish"),
        "{}",
        example.service.log()
    );
}
