//! Calls of the lease functions in Postgres. The lease store calls SQL functions in the schema of
//! the fence, on the fence's connections.
//!
//! The fence implements [`Calls`], and the store uses it, so neither imports the other. Therefore
//! `crates/verification/interleavings` can run the store with a model of this module.

use std::{error::Error, pin::Pin, time::Duration};

use sqlx::postgres::{PgConnectOptions, PgRow};

use crate::token::Resource;

/// Database that provides the lease functions.
///
/// The only implementer is [`Fence<Postgres>`](crate::Fence). The trait is sealed.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot store leases",
    note = "use `PostgresLeases::new(fence)` with a `Fence<Postgres>`"
)]
#[expect(private_bounds, reason = "sealed")]
pub trait LeaseDatabase: Calls + 'static {}

impl<T: Calls + 'static> LeaseDatabase for T {}

pub(crate) trait Calls: Send + Sync {
    /// Runs statements as one transaction at READ COMMITTED, and returns their rows. `statements`
    /// builds the SQL with the given prefix of all names, such as `tower_fence.`, and with literals
    /// as arguments. The SQL is sent as one message, so it takes one round trip, even with a
    /// pooler.
    ///
    /// If the future is dropped while the statements run, they may still take effect.
    fn run_statements<'a>(&'a self, statements: Statements<'a>) -> CallFuture<'a, Vec<PgRow>>;

    /// Calls a function, as one transaction at READ COMMITTED and in one round trip, and returns
    /// its rows. The statement is prepared, unless a pooler could prepare it on one server
    /// connection and execute it on another.
    ///
    /// If the future is dropped while the function runs, the call may still take effect.
    fn call_function<'a>(&'a self, call: FunctionCall<'a>) -> CallFuture<'a, Vec<PgRow>>;

    /// Returns the prefix of all names, such as `tower_fence.`.
    fn prefix(&self) -> CallFuture<'_, String>;

    /// Returns the connection options for a session that listens. Returns `None` if a pooler
    /// assigns a server connection to each transaction, because a session cannot listen in that
    /// case.
    fn session_options(&self) -> Option<PgConnectOptions>;

    /// Waits until the application closes the pool.
    fn closed(&self) -> Pin<Box<dyn Future<Output = ()> + Send>>;

    fn answer_timeout(&self) -> Duration;
}

/// Function that builds the statements for a prefix.
pub(crate) type Statements<'a> = Box<dyn FnOnce(&str) -> String + Send + 'a>;

pub(crate) struct FunctionCall<'a> {
    pub(crate) function: &'static str,
    pub(crate) arguments: &'a [Argument<'a>],
    /// The columns to select from the function's row `a`, or `a AS answer` if the function returns
    /// a value instead of a row.
    pub(crate) columns: &'static str,
    /// Whether the call may commit without waiting for the WAL flush.
    pub(crate) without_flush: bool,
    /// The resource whose rows the function locks. If such a row stays locked, one call of each
    /// function waits for the lock in the database. The other calls wait in this process, without a
    /// connection.
    pub(crate) resource: Option<&'a Resource>,
    /// Whether the call assigns a token, and therefore also waits for a write in progress. Calls
    /// that assign no token do not wait behind such calls.
    pub(crate) assigns_token: bool,
}

#[derive(Clone, Copy)]
pub(crate) enum Argument<'a> {
    Text(Option<&'a str>),
    Texts(&'a [String]),
    Bytes(&'a [u8]),
    Integer(Option<i64>),
    Truth(bool),
}

impl Argument<'_> {
    /// Returns the argument as an SQL expression that works for any characters and any settings of
    /// the session.
    pub(crate) fn literal(self) -> String {
        match self {
            Self::Text(Some(text)) => literal_text(text),
            Self::Texts(texts) => {
                let texts: Vec<_> = texts.iter().map(|text| literal_text(text)).collect();
                format!("ARRAY[{}]::text[]", texts.join(", "))
            }
            Self::Bytes(bytes) => literal_bytes(bytes),
            Self::Integer(Some(integer)) => integer.to_string(),
            Self::Truth(truth) => truth.to_string(),
            Self::Text(None) | Self::Integer(None) => "NULL".into(),
        }
    }
}

pub(crate) fn literal_text(text: &str) -> String {
    format!(
        "pg_catalog.convert_from({}, 'UTF8')",
        literal_bytes(text.as_bytes())
    )
}

fn literal_bytes(bytes: &[u8]) -> String {
    let digits: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("pg_catalog.decode('{digits}', 'hex')")
}

pub(crate) type CallFuture<'a, T> = Pin<Box<dyn Future<Output = Result<T, CallError>> + Send + 'a>>;

#[derive(Debug, thiserror::Error)]
#[error("the call failed")]
pub(crate) struct CallError {
    #[source]
    pub(crate) cause: Box<dyn Error + Send + Sync>,
    /// Whether a retry cannot help.
    pub(crate) is_misconfigured: bool,
}
