//! HTTP messages between an issuer and its clients, shared by both sides.
//!
//! 1. A request has a JSON body whose members are all optional: [`AcquireBody`], [`RenewBody`],
//!    [`BreakBody`].
//! 2. The lease id is in the header [`LEASE_ID`] or in the body, never in a URL.
//! 3. A successful response is a [`LeaseBody`], a [`StateBody`] or a [`PageBody`].
//! 4. A refusal is a problem document, which [`refusal`] writes and reads.
//! 5. A duration is a whole number of milliseconds, rounded up.

mod answer;
#[cfg(feature = "issuer")]
mod members;
pub(crate) mod refusal;
mod request;

use http::HeaderName;

#[cfg(feature = "issuer")]
pub(crate) use self::request::read_nothing;
pub(crate) use self::{
    answer::{LeaseBody, PageBody, StateBody},
    request::{AcquireBody, BreakBody, RenewBody},
};

/// Header that carries a lease id.
pub(crate) const LEASE_ID: HeaderName = HeaderName::from_static("lease-id");
