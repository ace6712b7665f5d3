//! [`StaleToken`]: the refusal of a stale token.

use http::StatusCode;
use serde::Deserialize;

use crate::{
    problem::ProblemType,
    token::{Resource, Token},
};

/// Refusal of a token that is not above the highest stale token of its resource.
///
/// The token was superseded or already used. The fence returns this value in its errors. A holder
/// can read it from a refusal of its write, because a `stale-token` problem has members with the
/// names of these fields.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, thiserror::Error)]
#[error("token {presented_token} for {resource} {}", self.why())]
#[non_exhaustive]
pub struct StaleToken {
    /// The resource.
    pub resource: Resource,
    /// The token that was refused.
    pub presented_token: Token,
    /// The highest stale token, 0 or more.
    pub max_token: i64,
    /// Whether `max_token` is the floor of a partition, because the resource has no row.
    ///
    /// If so, the token may belong to a lease that is still held. The holder must then renew the
    /// lease with a new token, and read the data again before it writes.
    #[serde(default)]
    pub by_floor: bool,
    /// Whether the token is a single-use token that has already been used for a write.
    ///
    /// If so, there is not necessarily a newer holder. To write again, the holder must renew its
    /// lease with a new token. If holders write several times under one token, the service has to
    /// admit reusable tokens.
    ///
    /// The fence sets this field if a single-use token equals `max_token` and no newer grant was
    /// announced. If grants are not announced, the field can be wrong: a fenced read or a reusable
    /// write with the next higher token also sets `max_token` to the presented token. A used token
    /// that is presented again as reusable, or to `Fence::raise`, is refused without this field.
    #[serde(default)]
    pub used: bool,
}

impl StaleToken {
    /// Returns the reason of the refusal, as the predicate of the error's text.
    fn why(&self) -> String {
        let max_token = self.max_token;
        if self.by_floor {
            format!("is not newer than {max_token}, the floor of its partition")
        } else if self.used {
            "was used already".to_owned()
        } else if self.presented_token.get() == max_token {
            "was superseded or used already".to_owned()
        } else {
            format!("is not newer than {max_token}")
        }
    }

    /// Reads the refusal from the response to a write. Returns `None` for any response other than
    /// 412 `stale-token`.
    #[must_use]
    pub fn from_response(status: StatusCode, body: &[u8]) -> Option<Self> {
        #[derive(Deserialize)]
        struct Typed {
            #[serde(rename = "type")]
            kind: String,
            #[serde(flatten)]
            stale: StaleToken,
        }
        if status != ProblemType::StaleToken.status() {
            return None;
        }
        let typed: Typed = serde_json::from_slice(body).ok()?;
        let stale = typed.stale;
        // A fence refuses only tokens that are not above `max_token`.
        let is_refusal = typed.kind == ProblemType::StaleToken.uri()
            && stale.presented_token.get() <= stale.max_token;
        is_refusal.then_some(stale)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_names_the_reason_of_the_refusal() {
        let mut stale = StaleToken {
            resource: Resource::new("a").unwrap(),
            presented_token: Token::MIN,
            max_token: 4,
            by_floor: false,
            used: false,
        };
        assert_eq!(stale.to_string(), "token 1 for a is not newer than 4");
        stale.by_floor = true;
        let text = "token 1 for a is not newer than 4, the floor of its partition";
        assert_eq!(stale.to_string(), text);
        (stale.max_token, stale.by_floor, stale.used) = (1, false, true);
        assert_eq!(stale.to_string(), "token 1 for a was used already");
        stale.used = false;
        let text = "token 1 for a was superseded or used already";
        assert_eq!(stale.to_string(), text);
    }

    #[test]
    fn only_a_stale_token_problem_is_read_as_one() {
        let body = br##"{"type":"https://docs.rs/tower-fence/latest/tower_fence/problem/#stale-token","title":"x","status":412,
                        "resource":"a","presented_token":3,"max_token":4}"##;
        let read = StaleToken::from_response(StatusCode::PRECONDITION_FAILED, body).unwrap();
        assert_eq!((read.presented_token.get(), read.max_token), (3, 4));
        assert!(!read.by_floor && !read.used);
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
