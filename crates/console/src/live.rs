//! The live events, as server-sent events.
//!
//! 1. A reader reads the new events every 200 ms. Writers neither wait for readers nor wake them.
//! 2. If more events have happened than a batch can contain, the message contains the number of
//!    missed events. The counts per second are always complete.
//! 3. A stream ends after 10 seconds with an `end` message. The page reconnects immediately, and
//!    continues after the last event that it has received.

use std::{convert::Infallible, env, path::Path, sync::Arc, time::Duration};

use axum::{
    extract::State,
    response::{
        IntoResponse, Response,
        sse::{Event as Message, Sse},
    },
};
use futures_util::stream;
use http::{HeaderMap, HeaderName};
use serde::{Deserialize, Serialize};
use tokio::time::{Instant, Interval, MissedTickBehavior, interval};

use crate::{
    Console, Events,
    event::{Event, KINDS},
    feed::{Feed, SECONDS},
    readers::Permit,
    rejection::Rejection,
    request::Query,
};
use tower_fence::{FenceDatabase, lease::LeaseAdmin};

/// The interval at which a reader reads the feed.
const TICK: Duration = Duration::from_millis(200);
/// The time without events after which an empty message is sent.
const QUIET: Duration = Duration::from_secs(1);

/// Returns the default name of this process on the page.
pub(super) fn process_name() -> String {
    let program = env::args_os().next();
    let program = program
        .as_ref()
        .and_then(|path| Path::new(path).file_stem());
    let program = program.map_or("process".into(), |name| name.to_string_lossy());
    let id = std::process::id();
    match env::var("HOSTNAME") {
        Ok(host) if !host.is_empty() => format!("{program} {id} on {host}"),
        _ => format!("{program} {id}"),
    }
}

#[derive(Deserialize)]
pub(super) struct Start {
    /// The id of the last message that the page has received. If the browser reconnects by itself,
    /// it sends this id in the header `Last-Event-ID` instead.
    after: Option<String>,
}

/// The content of one message.
#[derive(Serialize)]
struct News<'a> {
    /// Sent only in the first message of a stream.
    #[serde(skip_serializing_if = "Option::is_none")]
    hello: Option<Hello<'a>>,
    /// The current second of the feed.
    second: u64,
    events: Vec<Event>,
    missed: u64,
    /// Seconds of the feed, each with the number of events of each kind.
    seconds: Vec<(u64, [u32; KINDS.len()])>,
}

#[derive(Serialize)]
struct Hello<'a> {
    /// The name of the process.
    process: &'a str,
    kinds: [&'static str; KINDS.len()],
    kept_seconds: u64,
    /// Whether the stream continues an earlier stream of this process.
    goes_on: bool,
}

struct Reader {
    events: Events,
    permit: Permit,
    tick: Interval,
    process: String,
    last_id: Option<u64>,
    is_first: bool,
    sent_at: Instant,
    from_second: u64,
}

pub(super) async fn events<DB: FenceDatabase, L: LeaseAdmin>(
    State(console): State<Arc<Console<DB, L>>>,
    Query(Start { after }): Query<Start>,
    headers: HeaderMap,
) -> Result<Response, Rejection> {
    let permit = console.readers.take();
    let permit = permit.ok_or(Rejection::TooManyReaders)?;
    let header = headers.get("last-event-id");
    let header = header.and_then(|value| value.to_str().ok());
    let mut tick = interval(TICK);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let feed = console.events.feed();
    let reader = Reader {
        events: console.events.clone(),
        permit,
        tick,
        process: console.process.clone(),
        last_id: header.or(after.as_deref()).and_then(|id| last_id(feed, id)),
        is_first: true,
        sent_at: Instant::now(),
        from_second: 0,
    };
    let messages = stream::unfold(Some(reader), async |reader| {
        let mut reader = reader?;
        Some(match reader.next().await {
            Some(message) => (Ok::<_, Infallible>(message), Some(reader)),
            // A browser ignores a message without data.
            None => (Ok(Message::default().event("end").data("end")), None),
        })
    });
    // Prevents proxies such as nginx from buffering the response.
    let unbuffered = [(HeaderName::from_static("x-accel-buffering"), "no")];
    Ok((unbuffered, Sse::new(messages)).into_response())
}

/// Parses the id of a message. Returns the number of the event if the message is from this feed.
fn last_id(of: &Feed, id: &str) -> Option<u64> {
    let (feed, last_id) = id.split_once('-')?;
    (feed.parse() == Ok(of.id)).then_some(last_id.parse().ok()?)
}

impl Reader {
    /// Waits for the next message; `None` at the end of the stream.
    async fn next(&mut self) -> Option<Message> {
        loop {
            self.tick.tick().await;
            let now = Instant::now();
            if now >= self.permit.until {
                return None;
            }
            let is_news = self.is_first || self.last_id != Some(self.events.feed().last_id());
            if is_news || now.duration_since(self.sent_at) >= QUIET {
                self.sent_at = now;
                return Some(self.next_message());
            }
        }
    }

    fn next_message(&mut self) -> Message {
        let feed = self.events.feed();
        let batch = feed.after(self.last_id, self.from_second);
        let hello = self.is_first.then_some(Hello {
            process: &self.process,
            kinds: KINDS,
            kept_seconds: SECONDS,
            goes_on: self.last_id.is_some(),
        });
        let news = News {
            hello,
            second: feed.second(),
            events: batch.events,
            missed: batch.missed,
            seconds: batch.seconds,
        };
        // These types always serialize, and the JSON of serde contains no line breaks.
        let data = serde_json::to_string(&news).unwrap_or_default();
        if let Some((second, _)) = news.seconds.last() {
            self.from_second = *second;
        }
        self.is_first = false;
        self.last_id = Some(batch.last_id);
        let id = format!("{}-{}", feed.id, batch.last_id);
        Message::default().id(id).data(data)
    }
}
