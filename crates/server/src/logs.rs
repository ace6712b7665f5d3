//! Where logs go, and in which form. A line that cannot be written is lost, and nothing else: a full disk, or a reader that
//! is gone, stops no server and no command.

use std::{
    fmt,
    io::{self, IsTerminal, Stderr, Write},
};

use clap::ValueEnum;
use tracing_subscriber::EnvFilter;

use crate::failure::Failure;

/// The form of a line.
#[derive(Clone, Copy, ValueEnum)]
pub enum Format {
    /// For people.
    Plain,
    /// One JSON object per line, for programs.
    Json,
}

/// Logs to standard error what `filter` lets through.
pub fn start(format: Format, filter: &str) -> Result<(), Failure> {
    let filter = EnvFilter::try_new(filter)
        .map_err(|error| Failure::configuration(format!("the log filter is none: {error}")))?;
    let lines = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(|| Lossy(io::stderr()));
    match format {
        Format::Plain => lines.with_ansi(io::stderr().is_terminal()).init(),
        Format::Json => lines.json().flatten_event(true).init(),
    }
    Ok(())
}

/// Logs what is wrong, for commands that are no server.
pub fn start_for_tools() -> Result<(), Failure> {
    let filter = std::env::var("TOWER_FENCE_LOG").unwrap_or_else(|_| "warn".into());
    start(Format::Plain, &filter)
}

/// Says something to whoever has called the command.
pub fn say(text: impl fmt::Display) {
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
