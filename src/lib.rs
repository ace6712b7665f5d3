//! x
mod body;
pub mod epochs;
#[cfg(feature = "_fence")]
pub mod fence;
pub mod header;
pub mod issuer;
#[cfg(feature = "_fence")]
pub mod layer;
pub mod lease;
pub mod problem;
pub mod token;
#[cfg(feature = "_fence")]
pub use fence::{AdmitError, Admitted, CommitError, Fence, FencedTx, Stale, TokenUse};
#[cfg(feature = "_fence")]
pub use layer::{FenceLayer, HeaderField, PathParam};
pub use token::*;
