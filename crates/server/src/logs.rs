//! The log and its format.
//!
//! If a line cannot be written, for example because the disk is full or the reader has closed the
//! pipe, the line is lost, and the program continues.

use std::{
    fmt::Display,
    io::{self, IsTerminal, Stderr, Write},
};

use clap::ValueEnum;
use tower_fence_console::Events;
use tracing_subscriber::{EnvFilter, Layer, fmt, layer::SubscriberExt, util::SubscriberInitExt};

use crate::{failure::Failure, secrets::variable};

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

/// Parses a filter.
pub fn parse_filter(filter: &str) -> Result<EnvFilter, Failure> {
    EnvFilter::try_new(filter)
        .map_err(|error| Failure::configuration(format!("invalid log filter: {error}")))
}

/// Starts to log warnings and errors, for commands other than `serve`.
pub fn start_for_tools() -> Result<(), Failure> {
    let filter = variable("TOWER_FENCE_LOG")?;
    start(Format::Plain, filter.as_deref().unwrap_or("warn")).map(drop)
}

/// Prints a message to standard error.
pub fn say(text: impl Display) {
    _ = writeln!(io::stderr(), "{text}");
}

/// Standard error that ignores failed writes, because they cannot be reported anywhere else.
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
