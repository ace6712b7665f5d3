//! Where the two sides meet in Postgres: the lock side calls functions that stand beside the tables of the fence, and
//! the fence has the connections.

use std::{error::Error, pin::Pin, time::Duration};

use sqlx::postgres::{PgConnectOptions, PgRow};

/// A database that has the functions of the leases: [`Fence<Postgres>`](crate::Fence). It cannot be implemented
/// elsewhere.
#[expect(private_bounds, reason = "sealed")]
pub trait LeaseDatabase: Calls + 'static {}

impl<T: Calls + 'static> LeaseDatabase for T {}

/// What runs the calls.
pub(crate) trait Calls: Send + Sync {
    /// Runs the statements that are made for a schema (an identifier, ready to be put into a statement), as one
    /// transaction at READ COMMITTED, and returns their rows. They are one message, and so one round trip, also
    /// where a pooler stands in between; their arguments are literals.
    ///
    /// Dropped while they are under way, they may have had their effect.
    fn call<'a>(&'a self, statements: Statements<'a>) -> CallFuture<'a, Vec<PgRow>>;

    /// The schema of the functions, ready to be put into a statement.
    fn schema(&self) -> CallFuture<'_, String>;

    /// How to connect for a session that listens; `None` where a pooler in between gives each transaction a
    /// server of its own, so that there can be none.
    fn session_options(&self) -> Option<PgConnectOptions>;

    /// How long an answer may take.
    fn answer_wait(&self) -> Duration;
}

/// Makes statements for a schema.
pub(crate) type Statements<'a> = Box<dyn FnOnce(&str) -> String + Send + 'a>;

pub(crate) type CallFuture<'a, T> = Pin<Box<dyn Future<Output = Result<T, CallError>> + Send + 'a>>;

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub(crate) struct CallError(#[from] pub(crate) Box<dyn Error + Send + Sync>);
