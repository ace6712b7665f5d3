//! Events of this process, emitted with `tracing` for observers such as a console.
//!
//! Each event has the level `TRACE`, the target `tower_fence::event`, and no message. Its field
//! `event` is one of these words:
//!
//! | `event` | further fields | when |
//! |---|---|---|
//! | `admitted` | `resource`, `token`, `read` | a write (`read` is false) or a fenced read was admitted |
//! | `stale` | `resource`, `token`, `max_token`, `used`, `by_floor` | a stale token was refused |
//! | `forged` | `resource` if known, `token` | a token without a valid signature was refused |
//! | `refused` | `problem`, `resource` if known | a request was refused for another reason, or its handler returned an error of the fence |
//! | `waiting` | `resource`, `owner` if named | a request for a lease began to wait |
//! | `granted` | `resource`, `token`, `owner` if named, `waited_ms` if the request may wait and took at least 20 ms | the issuer granted a lease |
//! | `released` | `resource` | a lease was released |
//! | `lost` | `resource` | the issuer, or a guard in this process, detected that a lease is lost |
//! | `broken` | `resource` | an operator broke a lease |
//! | `superseded` | `resource`, `token`, `next` | the token of a grant was not above all tokens that the resource had received; `next` is the lowest token above them |
//!
//! The events of different requests may be out of order: for example, `released` may follow the
//! `granted` of the next holder. The events contain the names of resources and owners, but no lease
//! ids. If no subscriber enables the events, they cost nothing. Features of `tracing` such as
//! `release_max_level_info` remove them from the whole program.

#![allow(dead_code, reason = "the features decide which events there are")]

use std::time::Duration;

use tracing::trace;

use crate::token::{Resource, Token};

/// Target of the events.
pub const TARGET: &str = "tower_fence::event";

pub(crate) fn admitted(resource: &Resource, token: Token, read: bool) {
    trace!(target: TARGET, event = "admitted", resource = resource.as_str(), token = token.get(), read);
}

pub(crate) fn stale(stale: &crate::stale::StaleToken) {
    let (resource, token) = (stale.resource.as_str(), stale.presented_token.get());
    let (max_token, used, by_floor) = (stale.max_token, stale.used, stale.by_floor);
    trace!(target: TARGET, event = "stale", resource, token, max_token, used, by_floor);
}

pub(crate) fn forged(resource: Option<&Resource>, token: Token) {
    let resource = resource.map(Resource::as_str);
    trace!(target: TARGET, event = "forged", resource, token = token.get());
}

pub(crate) fn refused(problem: &'static str, resource: Option<&Resource>) {
    let resource = resource.map(Resource::as_str);
    trace!(target: TARGET, event = "refused", problem, resource);
}

pub(crate) fn waiting(resource: &Resource, owner: Option<&str>) {
    trace!(target: TARGET, event = "waiting", resource = resource.as_str(), owner);
}

pub(crate) fn granted(
    resource: &Resource,
    token: Token,
    owner: Option<&str>,
    waited: Option<Duration>,
) {
    let waited_ms = waited.map(|time| u64::try_from(time.as_millis()).unwrap_or(u64::MAX));
    let (resource, token) = (resource.as_str(), token.get());
    trace!(target: TARGET, event = "granted", resource, token, owner, waited_ms);
}

pub(crate) fn released(resource: &Resource) {
    trace!(target: TARGET, event = "released", resource = resource.as_str());
}

pub(crate) fn lost(resource: &Resource) {
    trace!(target: TARGET, event = "lost", resource = resource.as_str());
}

pub(crate) fn broken(resource: &Resource) {
    trace!(target: TARGET, event = "broken", resource = resource.as_str());
}

pub(crate) fn superseded(resource: &Resource, token: Token, next: Token) {
    let (resource, token, next) = (resource.as_str(), token.get(), next.get());
    trace!(target: TARGET, event = "superseded", resource, token, next);
}
