//! Where the two sides meet in Postgres: the lock side calls functions that stand beside the tables of the fence, and
//! the fence has the connections.

use std::{error::Error, pin::Pin, time::Duration};

use sqlx::postgres::{PgConnectOptions, PgRow};

use crate::token::Resource;

/// A database that has the functions of the leases: [`Fence<Postgres>`](crate::Fence). It cannot be implemented
/// elsewhere.
#[expect(private_bounds, reason = "sealed")]
pub trait LeaseDatabase: Calls + 'static {}

impl<T: Calls + 'static> LeaseDatabase for T {}

/// What runs the calls.
pub(crate) trait Calls: Send + Sync {
    /// Runs the statements that are made for a prefix of all names (`tower_fence.`), as one
    /// transaction at READ COMMITTED, and returns their rows. They are one message, and so one round trip, also
    /// where a pooler stands in between; their arguments are literals.
    ///
    /// Dropped while they are under way, they may have had their effect.
    fn call<'a>(&'a self, statements: Statements<'a>) -> CallFuture<'a, Vec<PgRow>>;

    /// Calls a function, as one transaction at READ COMMITTED and in one round trip, and returns its rows. The statement
    /// is prepared, unless a pooler may prepare it on one server and execute it on another.
    ///
    /// Dropped while it is under way, it may have had its effect.
    fn call_function<'a>(&'a self, call: FunctionCall<'a>) -> CallFuture<'a, Vec<PgRow>>;

    /// The prefix of all names, such as `tower_fence.`.
    fn prefix(&self) -> CallFuture<'_, String>;

    /// How to connect for a session that listens; `None` where a pooler in between gives each transaction a
    /// server of its own, so that there can be none.
    fn session_options(&self) -> Option<PgConnectOptions>;

    /// How long an answer may take.
    fn answer_wait(&self) -> Duration;
}

/// Makes statements for a prefix.
pub(crate) type Statements<'a> = Box<dyn FnOnce(&str) -> String + Send + 'a>;

/// The call of a function.
pub(crate) struct FunctionCall<'a> {
    pub(crate) function: &'static str,
    pub(crate) arguments: &'a [Argument<'a>],
    /// What is selected of its row `a`. Where it returns a value and no row, that is `a.answer`.
    pub(crate) columns: &'static str,
    /// Whether its COMMIT need not wait for the disk.
    pub(crate) lazily: bool,
    /// The resource whose rows it locks. Of the calls of one function for one resource, at most one waits for a lock for
    /// longer than a moment; the others wait in the process, without a connection.
    pub(crate) resource: Option<&'a Resource>,
}

/// An argument of a function.
#[derive(Clone, Copy)]
pub(crate) enum Argument<'a> {
    Text(Option<&'a str>),
    Texts(&'a [String]),
    Bytes(Option<&'a [u8]>),
    Integer(Option<i64>),
    Truth(bool),
}

impl Argument<'_> {
    /// As an expression of SQL, whatever its characters and the settings of the session.
    pub(crate) fn literal(self) -> String {
        match self {
            Self::Text(Some(text)) => literal_text(text),
            Self::Texts(texts) => {
                let texts: Vec<_> = texts.iter().map(|text| literal_text(text)).collect();
                format!("ARRAY[{}]::text[]", texts.join(", "))
            }
            Self::Bytes(Some(bytes)) => literal_bytes(bytes),
            Self::Integer(Some(integer)) => integer.to_string(),
            Self::Truth(truth) => truth.to_string(),
            Self::Text(None) | Self::Bytes(None) | Self::Integer(None) => "NULL".into(),
        }
    }
}

/// Text as an expression of SQL.
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

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
#[error("the call failed")]
pub(crate) struct CallError {
    #[source]
    pub(crate) cause: Box<dyn Error + Send + Sync>,
    /// Whether it does not pass by itself.
    pub(crate) is_misconfigured: bool,
}
