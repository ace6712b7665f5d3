//! Interface between the fence and a database: the statements of the fence, and the beginning and
//! end of its transactions.

mod admission;
mod migrations;
mod names;
#[cfg(feature = "postgres")]
mod postgres;
mod records;
mod setup;
#[cfg(feature = "sqlite")]
mod sqlite;
mod statement;
mod states;
mod tables;
mod transactions;

pub(in crate::fence) use sqlx::Arguments;
use sqlx::Database;
// sqlx does not re-export `TransactionManager`, which counts nested transactions and queues
// rollbacks. No other code names `sqlx-core`.
pub(in crate::fence) use sqlx_core::transaction::TransactionManager;

pub(crate) use self::{
    admission::{Admission, Admissions, Admit, HighestStale},
    records::{KeyedRequest, RecordId, Records, StoredResponse},
    setup::Setup,
    statement::{SingleStatements, Statement},
    states::StateRow,
    tables::{Announcement, Idle, Tables},
    transactions::{Begin, Committed, TransactionId, Transactions},
};
pub(in crate::fence) use self::{
    names::{Names, Topology},
    records::{Record, Reservation, ReservedKey},
    transactions::savepoint,
};

/// Database that the fence supports: `sqlx::Postgres` or `sqlx::Sqlite`.
///
/// The trait is sealed, and its methods are private:
///
/// ```compile_fail,E0624
/// fn begin<DB: tower_fence::FenceDatabase>() {
///     let _ = DB::begin;
/// }
/// ```
#[expect(private_bounds, reason = "sealed")]
pub trait FenceDatabase:
    Transactions + Setup + Admissions + SingleStatements + Records + Tables
{
}

impl<DB> FenceDatabase for DB where
    DB: Transactions + Setup + Admissions + SingleStatements + Records + Tables
{
}

/// Connection together with the schema that its statements address.
pub(crate) struct On<'a, DB: Database> {
    pub(in crate::fence) conn: &'a mut DB::Connection,
    pub(in crate::fence) names: &'a Names,
}

impl<'a, DB: Database> On<'a, DB> {
    pub(in crate::fence) const fn new(conn: &'a mut DB::Connection, names: &'a Names) -> Self {
        Self { conn, names }
    }
}
