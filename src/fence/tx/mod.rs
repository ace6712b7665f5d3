//! Transactions of the fence, and statements that commit by themselves.
//!
//! 1. [`Transaction`]: a transaction that is rolled back if it is dropped.
//! 2. [`StandaloneStatement`]: a statement that commits by itself.
//! 3. [`Slot`]: the transaction of a request, which the layer lends to its handler.
//! 4. [`FencedTx`]: the transaction type of the public API, either owned by the caller or borrowed
//!    from a slot.

mod clean_up;
mod fenced;
mod slot;
mod standalone;
mod transaction;

use std::time::Duration;

use tokio::time::timeout;

pub use self::fenced::FencedTx;
pub(super) use self::standalone::StandaloneStatement;
pub(crate) use self::{
    slot::{Contents, Place, Slot},
    transaction::Transaction,
};
use super::{
    conn::Connections,
    fault::{Failure, Fault},
    sql::Transactions,
};

/// Waits for the response to a statement. If no response arrives in time, returns a failure with
/// [`Fault::Silent`].
async fn response<T>(
    within: Duration,
    statement: impl Future<Output = sqlx::Result<T>>,
) -> Result<T, Failure> {
    match timeout(within, statement).await {
        Ok(response) => response.map_err(Failure::from),
        Err(_) => Err(Failure::silent()),
    }
}

/// Returns whether the connection must not be used again after this failure of a statement. When a
/// connection is closed, the server cancels its statement. If the session cannot write, this
/// function also closes the idle connections of the pool, except on SQLite, where each connection
/// to a replaced file is closed when it fails.
fn breaks_connection<DB: Transactions>(failure: &Failure, connections: &Connections<DB>) -> bool {
    if failure.cannot_write() {
        connections.close_idle();
    }
    failure.fault.is_gone() || failure.fault == Fault::Silent
}
