//! The log and its format.
//!
//! 1. A thread writes the lines to standard error, because a write waits while a pipe is full. The
//!    other threads renew leases and handle signals in the meantime.
//! 2. If a line cannot be written, for example because the disk is full or the reader has closed
//!    the pipe, the line is lost, and the program continues. Lines are also lost if too many of
//!    them wait to be written.
//! 3. Before it exits, the program calls [`flush`].

use std::{
    fmt::Display,
    io::{self, IsTerminal, Write},
    sync::{
        LazyLock,
        mpsc::{Sender, SyncSender, TrySendError, channel, sync_channel},
    },
    thread,
    time::{Duration, Instant},
};

use clap::ValueEnum;
use tower_fence_console::Events;
use tracing_subscriber::{EnvFilter, Layer, fmt, layer::SubscriberExt, util::SubscriberInitExt};

use crate::{failure::Failure, secrets::variable};

/// The maximum number of lines that wait to be written.
const MOST_WAITING: usize = 4_096;
/// How long [`flush`] waits.
const FLUSHED: Duration = Duration::from_secs(1);
/// Pause between two attempts to add to a full queue.
const PAUSE: Duration = Duration::from_millis(10);

/// The queue of the thread that writes to standard error.
static QUEUE: LazyLock<SyncSender<Item>> = LazyLock::new(|| {
    let (queue, items) = sync_channel(MOST_WAITING);
    // The thread ends with the process.
    thread::spawn(move || {
        for item in items {
            match item {
                // A failure cannot be reported anywhere else.
                Item::Line(line) => _ = io::stderr().write_all(&line),
                Item::Flush(done) => _ = done.send(()),
            }
        }
    });
    queue
});

enum Item {
    Line(Vec<u8>),
    /// Reports that all earlier lines have been written.
    Flush(Sender<()>),
}

/// The format of a line.
#[derive(Clone, Copy, ValueEnum)]
pub enum Format {
    /// Lines of text.
    Plain,
    /// One JSON object per line.
    Json,
}

/// Starts to log the events that match `filter` to standard error. Returns the events for the
/// console, which do not depend on the filter.
pub fn start(format: Format, filter: &str) -> Result<Events, Failure> {
    let filter = parse_filter(filter)?;
    let lines = fmt::layer().with_writer(|| Lossy);
    let lines = match format {
        Format::Plain => lines.with_ansi(io::stderr().is_terminal()).boxed(),
        Format::Json => lines.json().flatten_event(true).boxed(),
    };
    let events = Events::new();
    tracing_subscriber::registry()
        .with(lines.with_filter(filter))
        .with(events.layer())
        .init();
    Ok(events)
}

/// Parses a filter.
pub fn parse_filter(filter: &str) -> Result<EnvFilter, Failure> {
    EnvFilter::try_new(filter)
        .map_err(|error| Failure::configuration(format!("invalid log filter: {error}")))
}

/// Starts to log warnings and errors, for commands other than `serve`.
pub fn start_for_tools() -> Result<(), Failure> {
    // A blank variable counts as missing.
    let filter = variable("TOWER_FENCE_LOG")?.filter(|filter| !filter.trim().is_empty());
    start(Format::Plain, filter.as_deref().unwrap_or("warn")).map(drop)
}

/// Prints a message to standard error, and waits like [`flush`] until it is written.
pub fn say(text: impl Display) {
    let until = Instant::now() + FLUSHED;
    add(Item::Line(format!("{text}\n").into_bytes()), until);
    flush_until(until);
}

/// Adds a message to the lines of the log. Does not wait until it is written.
pub fn report(text: impl Display) {
    _ = Lossy.write_all(format!("{text}\n").as_bytes());
}

/// Waits until the earlier lines have been written. The wait ends after a second, because a pipe
/// may be full.
pub fn flush() {
    flush_until(Instant::now() + FLUSHED);
}

fn flush_until(until: Instant) {
    let (done, is_done) = channel();
    add(Item::Flush(done), until);
    _ = is_done.recv_timeout(until.saturating_duration_since(Instant::now()));
}

/// Adds an item to the queue. While the queue is full, retries until this time.
fn add(mut item: Item, until: Instant) {
    while let Err(TrySendError::Full(refused)) = QUEUE.try_send(item)
        && Instant::now() < until
    {
        item = refused;
        thread::sleep(PAUSE);
    }
}

/// A writer that adds each line to the queue, and discards the line if the queue is full.
struct Lossy;

impl Write for Lossy {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        _ = QUEUE.try_send(Item::Line(line.into()));
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
