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
        atomic::{AtomicBool, Ordering::Relaxed},
        mpsc::{Sender, SyncSender, TrySendError, channel, sync_channel},
    },
    thread,
    time::{Duration, Instant, SystemTime},
};

use clap::ValueEnum;
use serde_json::json;
use tower_fence_console::Events;
use tracing_subscriber::{
    EnvFilter, Layer, filter::LevelFilter, fmt, layer::SubscriberExt, util::SubscriberInitExt,
};

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

/// Whether the log has started, and each line is a JSON object.
static IS_JSON: AtomicBool = AtomicBool::new(false);

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
    IS_JSON.store(matches!(format, Format::Json), Relaxed);
    Ok(events)
}

/// Parses a filter. Refuses a word that is not a level, because `EnvFilter` treats it as a target.
/// A filter with only a misspelled level would disable the whole log.
pub fn parse_filter(filter: &str) -> Result<EnvFilter, Failure> {
    let invalid = |why: &dyn Display| Failure::configuration(format!("invalid log filter: {why}"));
    let directives: Vec<_> = filter
        .split(',')
        .map(str::trim)
        .filter(|directive| !directive.is_empty())
        .collect();
    for directive in &directives {
        let target = match directive.find(['=', '[']) {
            Some(end) => &directive[..end],
            None if directive.parse::<LevelFilter>().is_ok() => continue,
            None => {
                return Err(invalid(&format_args!(
                    "`{directive}` must be a level (error, warn, info, debug, trace or off) or MODULE=LEVEL"
                )));
            }
        };
        if !target.is_empty() && !target.split("::").all(is_identifier) {
            return Err(invalid(&format_args!(
                "`{target}` must be the path of a module, such as tower_fence or sqlx::query"
            )));
        }
    }
    EnvFilter::try_new(directives.join(",")).map_err(|error| invalid(&error))
}

fn is_identifier(text: &str) -> bool {
    let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_';
    !text.is_empty() && text.chars().all(is_part)
}

/// Starts to log warnings and errors, for commands other than `serve`.
pub fn start_for_tools() -> Result<(), Failure> {
    let filter = variable("TOWER_FENCE_LOG")?;
    start(Format::Plain, filter.as_deref().unwrap_or("warn,redis=off")).map(drop)
}

/// Prints a message to standard error, and waits like [`flush`] until it is written.
pub fn say(text: impl Display) {
    let until = Instant::now() + FLUSHED;
    add(Item::Line(format!("{text}\n").into_bytes()), until);
    flush_until(until);
}

/// Prints the reason for the exit in the format of the log, like [`say`]. The filter does not apply
/// to this line.
pub fn say_exit(text: &str, status: u8) {
    if !IS_JSON.load(Relaxed) {
        return say(format_args!("tower-fence: {text}"));
    }
    let now = humantime::format_rfc3339_micros(SystemTime::now());
    say(json!({
        "timestamp": now.to_string(),
        "level": "ERROR",
        "message": text,
        "status": status,
        "target": "tower_fence",
    }));
}

/// Adds a message of `run` to the lines of the log. Does not wait until it is written.
pub fn report(text: impl Display) {
    _ = Lossy.write_all(format!("tower-fence: {text}\n").as_bytes());
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log_filter_with_an_unknown_word_is_refused() {
        for filter in [
            "",
            "info",
            " WARN ",
            "off",
            "info, sqlx=warn,",
            "info,tower_fence=debug,sqlx::query=off",
            "info,tower_fence[acquire]=debug",
            "info,[{resource=sku-1}]=debug",
        ] {
            let parsed = parse_filter(filter);
            assert!(parsed.is_ok(), "{filter}: {:?}", parsed.err());
        }
        for (filter, named) in [
            ("warning", "`warning` must be a level"),
            ("info,inof", "`inof` must be a level"),
            ("tower_fence", "`tower_fence` must be a level"),
            ("error;sqlx=warn", "`error;sqlx` must be the path"),
            ("info sqlx=warn", "`info sqlx` must be the path"),
            ("tower-fence=debug", "`tower-fence` must be the path"),
            ("sqlx:query=warn", "`sqlx:query` must be the path"),
            ("sqlx=warning", "invalid"),
        ] {
            let refused = parse_filter(filter).err().unwrap();
            assert!(refused.text.contains(named), "{}", refused.text);
        }
    }
}
