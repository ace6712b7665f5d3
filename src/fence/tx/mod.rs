//! Transactions of the fence, and statements that commit by themselves.
//!
//! 1. [`Session`]: the connection of a transaction, or of a statement that commits by itself.
//! 2. [`Transaction`]: a transaction that is rolled back if it is dropped.
//! 3. [`Slot`]: the transaction of a request, which the layer lends to its handler.
//! 4. [`FencedTx`]: the transaction type of the public API, either owned by the caller or borrowed
//!    from a slot.

mod fenced;
mod session;
mod slot;
mod transaction;

pub use self::fenced::FencedTx;
pub(super) use self::session::Session;
pub(crate) use self::{
    fenced::Written,
    slot::{Contents, Place, Slot},
    transaction::Transaction,
};
