//! Where logs go, and in which form. A line that cannot be written is lost, and nothing else: a full disk, or a reader that
//! is gone, stops no server and no command.

use std::{
    fmt::Display,
    io::{self, IsTerminal, Stderr, Write},
};

use clap::ValueEnum;
use tower_fence_console::Events;
use tracing_subscriber::{EnvFilter, Layer, fmt, layer::SubscriberExt, util::SubscriberInitExt};

use crate::failure::Failure;

/// The form of a line.
#[derive(Clone, Copy, ValueEnum)]
pub enum Format {
    /// For people.
    Plain,
    /// One JSON object per line, for programs.
    Json,
}

/// Logs to standard error what `filter` lets through. Returns the events for the console, which do
/// not depend on the filter.
pub fn start(format: Format, filter: &str) -> Result<Events, Failure> {
    let filter = EnvFilter::try_new(filter)
        .map_err(|error| Failure::configuration(format!("invalid log filter: {error}")))?;
    let lines = fmt::layer().with_writer(|| Lossy(io::stderr()));
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

/// Logs what is wrong, for commands that are no server.
pub fn start_for_tools() -> Result<(), Failure> {
    let filter = std::env::var("TOWER_FENCE_LOG").unwrap_or_else(|_| "warn".into());
    start(Format::Plain, &filter).map(drop)
}

/// Says something to whoever has called the command.
pub fn say(text: impl Display) {
    _ = writeln!(io::stderr(), "{text}");
}

/// Standard error, whose failures nobody hears of: there is no other place to tell of them.
struct Lossy(Stderr);

impl Write for Lossy {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        _ = self.0.write_all(line);
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        _ = self.0.flush();
        Ok(())
    }
}
