//! What an issuer and its clients say to each other over HTTP, written once for both sides.
//!
//! 1. A request has a JSON body whose members are all optional: [`AcquireBody`], [`RenewBody`].
//! 2. The lease id travels in the header [`LEASE_ID`], never in a URL.
//! 3. An answer is a [`LeaseBody`], a [`StateBody`] or a [`PageBody`].
//! 4. A refusal is a problem document, whose members [`refusal`] writes and reads.
//! 5. A length of time is a whole number of milliseconds, rounded up.

mod answer;
#[cfg(feature = "issuer")]
mod members;
pub(crate) mod refusal;
mod request;

use http::HeaderName;

pub(crate) use self::{
    answer::{LeaseBody, PageBody, StateBody},
    request::{AcquireBody, BreakBody, RenewBody},
};
#[cfg(feature = "issuer")]
pub(crate) use self::{members::InvalidMember, request::read_nothing};

/// The header that carries a lease id.
pub(crate) const LEASE_ID: HeaderName = HeaderName::from_static("lease-id");
