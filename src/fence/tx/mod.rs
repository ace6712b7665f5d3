//! Transactions of the fence, and the single statement that is its own transaction.
//!
//! 1. [`Transaction`]: a transaction. If it is dropped, no open transaction and no lock remain.
//! 2. [`StandaloneStatement`]: a statement that is its own transaction, with the same guarantee.
//! 3. [`Slot`]: the transaction of a request, which the layer lends to its handler.
//! 4. [`FencedTx`]: a transaction as the application sees it, either owned or lent.

mod clean_up;
mod fenced;
mod slot;
mod standalone;
mod transaction;

pub use self::fenced::FencedTx;
pub(super) use self::standalone::StandaloneStatement;
pub(crate) use self::{
    slot::{Closed, Place, Slot},
    transaction::Transaction,
};
