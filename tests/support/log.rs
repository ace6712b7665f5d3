//! The log of a test.

use std::sync::Mutex;

use tracing::subscriber::{DefaultGuard, set_default};
use tracing_subscriber::{EnvFilter, fmt::MakeWriter};

/// The buffer that receives the log.
pub struct Log(&'static Mutex<Vec<u8>>);

impl Log {
    /// Collects the log of this thread, down to this level, until the guard is dropped.
    pub fn of_this_thread(level: &str) -> (Self, DefaultGuard) {
        // A subscriber must be `'static`, so the buffer is never freed.
        let log: &'static Mutex<Vec<u8>> = Box::leak(Box::default());
        let subscriber = tracing_subscriber::fmt()
            .with_ansi(false)
            .with_env_filter(EnvFilter::new(level))
            .with_writer(move || log.make_writer());
        (Self(log), set_default(subscriber.finish()))
    }

    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.0.lock().unwrap()).into_owned()
    }

    /// Returns the log since the last call.
    pub fn take(&self) -> String {
        String::from_utf8(std::mem::take(&mut *self.0.lock().unwrap())).unwrap()
    }
}
