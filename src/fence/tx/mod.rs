//! Transactions of the fence, and statements that commit by themselves.
//!
//! 1. [`Transaction`]: a transaction that is rolled back if it is dropped.
//! 2. [`StandaloneStatement`]: a statement that commits by itself.
//! 3. [`Slot`]: the transaction of a request, which the layer lends to its handler.
//! 4. [`FencedTx`]: the transaction type of the public API, either owned by the caller or borrowed
//!    from a slot.

mod fenced;
mod session;
mod slot;
mod standalone;
mod transaction;

pub use self::fenced::FencedTx;
pub(super) use self::standalone::StandaloneStatement;
pub(crate) use self::{
    fenced::Written,
    slot::{Contents, Place, Slot},
    transaction::Transaction,
};
