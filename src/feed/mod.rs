//! What has just happened in this process, for the [console](crate::console).
//!
//! A console switches it on; before that, and without the feature `console`, telling of an event costs nothing.
//! Whoever tells puts it into a ring of fixed length and goes on: nobody is woken, and nobody is waited for but another
//! one that does the same. Readers come by, several times a second, and take what is new to them.
//!
//! It is that of the process, as the metrics are, whatever fence or issuer tells. Names of resources and owners go
//! into it, lease ids never do.

#![cfg_attr(not(feature = "console"), allow(unused_variables))]

#[cfg(feature = "console")]
mod event;
#[cfg(feature = "console")]
mod kept;

#[cfg(feature = "console")]
pub(crate) use self::{
    event::{Event, KINDS, What},
    kept::{Feed, SECONDS},
};
use crate::token::{Resource, Token};

/// That of the process.
#[cfg(feature = "console")]
pub(crate) static FEED: std::sync::LazyLock<Feed> = std::sync::LazyLock::new(Feed::default);

/// Whether a console wants to know.
#[cfg(feature = "console")]
static ON: std::sync::atomic::AtomicBool = std::sync::atomic::AtomicBool::new(false);

/// From now on events are kept.
#[cfg(feature = "console")]
pub(crate) fn switch_on() {
    ON.store(true, std::sync::atomic::Ordering::Relaxed);
}

/// Whether events are kept.
#[cfg(feature = "issuer")]
pub(crate) fn is_on() -> bool {
    #[cfg(feature = "console")]
    let on = ON.load(std::sync::atomic::Ordering::Relaxed);
    #[cfg(not(feature = "console"))]
    let on = false;
    on
}

#[cfg(feature = "console")]
fn tell(what: impl FnOnce() -> What) {
    if is_on() {
        FEED.push(what());
    }
}

/// A token was admitted, for a write or for a fenced read.
#[cfg(feature = "_fence")]
pub(crate) fn admitted(resource: &Resource, token: Token, read: bool) {
    #[cfg(feature = "console")]
    tell(|| What::Admitted {
        resource: resource.clone(),
        token,
        read,
    });
}

/// A stale token was refused.
#[cfg(feature = "_fence")]
pub(crate) fn stale(stale: &crate::stale::StaleToken) {
    #[cfg(feature = "console")]
    tell(|| What::Stale {
        resource: stale.resource.clone(),
        token: stale.presented_token,
        max_token: stale.max_token,
        by_floor: stale.by_floor,
    });
}

/// A token was refused that the issuer has not signed.
#[cfg(feature = "_fence")]
pub(crate) fn forged(resource: Option<&Resource>, token: Token) {
    #[cfg(feature = "console")]
    tell(|| What::Forged {
        resource: resource.cloned(),
        token,
    });
}

/// A request was refused for another reason.
#[cfg(feature = "_axum")]
pub(crate) fn refused(problem: &'static str, resource: Option<&Resource>) {
    #[cfg(feature = "console")]
    tell(|| What::Refused {
        problem,
        resource: resource.cloned(),
    });
}

/// Somebody waits in line for a lease.
#[cfg(feature = "issuer")]
pub(crate) fn waiting(resource: &Resource, owner: Option<&str>) {
    #[cfg(feature = "console")]
    tell(|| What::Waiting {
        resource: resource.clone(),
        owner: owner.map(Into::into),
    });
}

/// A lease was granted; `waited` where it was waited for, so that it was handed over.
#[cfg(feature = "issuer")]
pub(crate) fn granted(
    resource: &Resource,
    token: Token,
    owner: Option<&str>,
    waited: Option<std::time::Duration>,
) {
    #[cfg(feature = "console")]
    tell(|| What::Granted {
        resource: resource.clone(),
        token,
        owner: owner.map(Into::into),
        waited_ms: waited.map(|time| u64::try_from(time.as_millis()).unwrap_or(u64::MAX)),
    });
}

/// A lease was given back.
#[cfg(feature = "issuer")]
pub(crate) fn released(resource: &Resource) {
    #[cfg(feature = "console")]
    tell(|| What::Released {
        resource: resource.clone(),
    });
}

/// A holder came too late, or a guard of this process has lost its lease.
#[cfg(any(feature = "issuer", feature = "client"))]
pub(crate) fn lost(resource: &Resource) {
    #[cfg(feature = "console")]
    tell(|| What::Lost {
        resource: resource.clone(),
    });
}

/// An operator has ended a lease by force.
#[cfg(feature = "issuer")]
pub(crate) fn broken(resource: &Resource) {
    #[cfg(feature = "console")]
    tell(|| What::Broken {
        resource: resource.clone(),
    });
}

/// A grant was below what the resource has seen, and was granted anew from `next` on.
pub(crate) fn outranked(resource: &Resource, token: Token, next: Token) {
    #[cfg(feature = "console")]
    tell(|| What::Outranked {
        resource: resource.clone(),
        token,
        next,
    });
}
