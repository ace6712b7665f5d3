//! How a lease is lost.

use http::StatusCode;
use serde::Deserialize;

use crate::{
    lease::LeaseError,
    metrics,
    problem::ProblemType,
    token::{Resource, Token},
};

/// Why a lease is not held any more.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Loss {
    /// The store says that it is not held: it ran out, or was ended by force.
    #[error("the lease on {resource} is held no more: the store refused to renew it")]
    Refused {
        /// The resource.
        resource: Resource,
    },
    /// Its time is up, and no renewal got through. The store may still hold it.
    #[error("the lease on {resource} has run out: no renewal got through")]
    Expired {
        /// The resource.
        resource: Resource,
        /// What the last renewal met, if one was tried.
        #[source]
        cause: Option<LeaseError>,
    },
    /// A resource refused its token, because it has seen a newer one.
    #[error("the lease on {} is outranked: token {} is dead, up to {} are", .0.resource, .0.presented_token, .0.max_token)]
    Outranked(StaleToken),
    /// The guard was released or dropped.
    #[error("the lease on {resource} was given up")]
    GivenUp {
        /// The resource.
        resource: Resource,
    },
}

impl Loss {
    /// Counts it, once per guard.
    pub(super) fn count(&self) {
        metrics::held(-1.0);
        let reason = match self {
            Self::Refused { .. } => "refused",
            Self::Expired { .. } => "expired",
            Self::Outranked(_) => "outranked",
            Self::GivenUp { .. } => return,
        };
        metrics::count_by("tower_fence_leases_lost_total", "reason", reason);
    }
}

/// What a resource says about a token that is dead: the members of a `stale-token` problem.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[non_exhaustive]
pub struct StaleToken {
    /// The resource.
    pub resource: Resource,
    /// The token that was refused.
    pub presented_token: Token,
    /// The highest token that is dead.
    pub max_token: Token,
}

impl StaleToken {
    /// Reads the answer to a write; `None` for any other than 412 `stale-token`.
    #[must_use]
    pub fn from_response(status: StatusCode, body: &[u8]) -> Option<Self> {
        #[derive(Deserialize)]
        struct Typed {
            #[serde(rename = "type")]
            kind: String,
        }
        if status != ProblemType::StaleToken.status() {
            return None;
        }
        let typed: Typed = serde_json::from_slice(body).ok()?;
        (typed.kind == ProblemType::StaleToken.uri())
            .then(|| serde_json::from_slice(body).ok())
            .flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stale_token_is_read_from_the_problem_and_from_nothing_else() {
        let body = br##"{"type":"https://docs.rs/tower-fence/latest/tower_fence/problem/#stale-token","title":"x","status":412,
                        "resource":"a","presented_token":3,"max_token":4}"##;
        let read = StaleToken::from_response(StatusCode::PRECONDITION_FAILED, body).unwrap();
        assert_eq!((read.presented_token.get(), read.max_token.get()), (3, 4));
        assert_eq!(StaleToken::from_response(StatusCode::CONFLICT, body), None);
        for other in [
            &b""[..],
            b"[]",
            br##"{"type":"about:blank","resource":"a","presented_token":3,"max_token":4}"##,
            br##"{"type":"https://docs.rs/tower-fence/latest/tower_fence/problem/#stale-token"}"##,
            br##"{"type":"https://docs.rs/tower-fence/latest/tower_fence/problem/#stale-token","resource":"a","presented_token":0,"max_token":4}"##,
        ] {
            let read = StaleToken::from_response(StatusCode::PRECONDITION_FAILED, other);
            assert_eq!(read, None);
        }
    }
}
