//! Transactions of the fence, and the single statement that is one by itself.
//!
//! 1. [`Transaction`]: dropped at any moment, it leaves no open transaction and no lock behind.
//! 2. [`StandaloneStatement`]: the same for a statement that is its own transaction.
//! 3. [`Slot`]: the transaction of a request, which the layer lends to its handler.
//! 4. [`FencedTx`]: a transaction as the application sees it, its own or a lent one.

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
