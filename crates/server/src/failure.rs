//! The failure of a command: an exit status and a message.

use std::{error::Error, path::Path};

use sqlx::error::DatabaseError;
use tower_fence::chain::Chain;

/// The command line is invalid (`EX_USAGE`).
pub const USAGE: u8 = 64;
/// A server does not answer (`EX_UNAVAILABLE`).
pub const UNAVAILABLE: u8 = 69;
/// The lease is held by another holder (`EX_TEMPFAIL`).
pub const HELD: u8 = 75;
/// The secret is rejected (`EX_NOPERM`).
pub const REFUSED: u8 = 77;
/// The configuration is invalid (`EX_CONFIG`).
pub const CONFIGURATION: u8 = 78;
/// The command exceeded `--max-time` and was stopped.
pub const TIME_UP: u8 = 123;
/// The lease was lost. The program `timeout` uses the same status for a timeout.
pub const LOST: u8 = 124;
/// The lease was lost, and processes of the command are still running.
pub const STILL_RUNNING: u8 = 125;
/// The command cannot be executed. Shells use this status, too.
pub const NOT_EXECUTABLE: u8 = 126;
/// The command was not found. Shells use this status, too.
pub const NOT_FOUND: u8 = 127;

/// Beginning of the text of a failure if the server of the leases does not answer.
pub const NO_ANSWER: &str = "no answer from the server";

/// The failure of a command.
#[derive(Debug)]
pub struct Failure {
    pub status: u8,
    pub text: String,
}

impl Failure {
    pub fn new(status: u8, text: impl Into<String>) -> Self {
        let text = text.into();
        Self { status, text }
    }

    pub fn usage(text: impl Into<String>) -> Self {
        Self::new(USAGE, text)
    }

    pub fn configuration(text: impl Into<String>) -> Self {
        Self::new(CONFIGURATION, text)
    }

    pub fn unavailable(what: &str, error: &dyn Error) -> Self {
        Self::new(UNAVAILABLE, format!("{what}: {}", chain(error)))
    }

    pub fn other(text: impl Into<String>) -> Self {
        Self::new(1, text)
    }

    /// Returns the text, with a hint for operators if one is known. The library's own hints are for
    /// programmers.
    pub fn for_people(&self) -> String {
        let text = self
            .text
            .replace("call `Fence::migrate`", "run `tower-fence migrate`")
            .replace("Call `Fence::migrate`", "Run `tower-fence migrate`");
        let hint = if text.starts_with(NO_ANSWER) && text.contains("refused") {
            "; start the server with `tower-fence serve`, or name another one with --url"
        } else if text.contains("no failover can be detected") {
            "; if the privilege is missing, grant the role EXECUTE on pg_walfile_name; otherwise see --no-failover-detection"
        } else if text.contains("permission denied for database") {
            "; grant the role CREATE on the database, or migrate as its owner"
        } else if text.contains("which could replace functions") {
            "; migrate as that role, or choose another schema with --database-schema"
        } else {
            ""
        };
        format!("{text}{hint}")
    }

    /// Creates the failure for a file that cannot be used.
    pub fn file(what: &str, path: &Path, error: impl std::fmt::Display) -> Self {
        Self::configuration(format!("{what} {}: {error}", path.display()))
    }
}

/// Formats an error with its causes, without the prefixes of sqlx, which do not help an operator.
pub fn chain(error: &dyn Error) -> String {
    Chain(error)
        .to_string()
        .replace("while executing migrations: ", "the migration failed: ")
        .replace("error returned from database: ", "")
        .replace("error with configuration: ", "")
}

/// Returns the error of the database, if `error` is one or wraps one directly.
pub fn database_error<'a>(error: &'a (dyn Error + 'static)) -> Option<&'a dyn DatabaseError> {
    match error.downcast_ref() {
        Some(sqlx::Error::Database(refused)) => Some(&**refused),
        // The source of `sqlx::Error::Database`.
        _ => error
            .downcast_ref::<Box<dyn DatabaseError>>()
            .map(|refused| &**refused),
    }
}
