//! Reading of a request's body, limited in size and time, before the request holds a connection.
//!
//! If the service responds before it has read the whole body, the connection is closed. A client
//! that sends its whole request before it reads then gets a broken pipe instead of the response.
//! Therefore the rest of a refused body is read in the background ([`discard`]).

use std::{error::Error, iter::successors, time::Duration};

use axum::body::Body;
use bytes::Bytes;
use http::{HeaderMap, header::EXPECT};
use http_body::Body as _;
use http_body_util::{BodyExt, Collected, LengthLimitError, Limited};
use tokio::time::timeout;

use crate::problem::{Problem, ProblemType};

/// Reads the whole body, including trailers. If the body is too large, discards the rest of it.
pub(crate) async fn read(
    headers: &HeaderMap,
    mut body: Body,
    limit_bytes: usize,
    within: Duration,
) -> Result<Collected<Bytes>, BodyError> {
    let too_large = BodyError::TooLarge { limit_bytes };
    // If the declared length is above the limit, the body is refused before any byte is read.
    if body.size_hint().lower() > limit_bytes as u64 {
        discard(headers, body, limit_bytes, within);
        return Err(too_large);
    }
    match timeout(within, Limited::new(&mut body, limit_bytes).collect()).await {
        Ok(Ok(collected)) => Ok(collected),
        Ok(Err(error)) if error.is::<LengthLimitError>() => {
            tokio::spawn(drain(body, limit_bytes, within));
            Err(too_large)
        }
        Ok(Err(error)) if is_length_limit(&*error) => Err(BodyError::OuterLimit),
        Ok(Err(_)) => Err(BodyError::Malformed),
        Err(_) => Err(BodyError::TimedOut { within }),
    }
}

/// Returns whether a limit of length caused the error. axum wraps the errors of bodies.
fn is_length_limit(error: &(dyn Error + 'static)) -> bool {
    successors(Some(error), |&error| error.source()).any(|error| error.is::<LengthLimitError>())
}

/// Maximum amount of a refused body that is read, as a multiple of the body's limit.
const DISCARDED_LIMITS: u64 = 4;

/// Reads the body of a refused request in the background, unless the client waits for `100
/// Continue`. Such a client has not sent its body, and need not send it.
pub(crate) fn discard(headers: &HeaderMap, body: Body, limit_bytes: usize, within: Duration) {
    if !body.is_end_stream() && !headers.contains_key(EXPECT) {
        tokio::spawn(drain(body, limit_bytes, within));
    }
}

/// Reads the rest of a refused body, up to four times the limit and within the timeout. If the
/// declared length is greater than that, the body is not read.
async fn drain(mut body: Body, limit_bytes: usize, within: Duration) {
    let mut left = DISCARDED_LIMITS.saturating_mul(limit_bytes as u64);
    if body.size_hint().lower() > left {
        return;
    }
    let to_the_end = async {
        while let Some(Ok(frame)) = body.frame().await {
            let bytes = frame.data_ref().map_or(0, Bytes::len) as u64;
            if bytes > left {
                return;
            }
            left -= bytes;
        }
    };
    // If the timeout passes, the client may not receive the response.
    let _ = timeout(within, to_the_end).await;
}

/// Error returned when a request's body was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BodyError {
    /// The body is longer than the limit.
    #[error("the body is longer than {limit_bytes} bytes")]
    TooLarge {
        /// The limit, in bytes.
        limit_bytes: usize,
    },
    /// The body is longer than a limit that another layer has set.
    #[error("the body is longer than a limit of the service")]
    OuterLimit,
    /// The body did not arrive in time.
    #[error("the body did not arrive within {within:?}")]
    TimedOut {
        /// The timeout.
        within: Duration,
    },
    /// The body is incomplete, or its framing is invalid.
    #[error("the body is incomplete, or its framing is invalid")]
    Malformed,
}

impl BodyError {
    /// Returns the problem type of the response.
    #[must_use]
    pub const fn problem_type(&self) -> ProblemType {
        match self {
            Self::TooLarge { .. } | Self::OuterLimit => ProblemType::BodyTooLarge,
            Self::TimedOut { .. } => ProblemType::BodyTimeout,
            Self::Malformed => ProblemType::MalformedBody,
        }
    }
}

impl From<&BodyError> for Problem {
    fn from(error: &BodyError) -> Self {
        let problem = Self::new(error.problem_type()).detail(error.to_string());
        match error {
            BodyError::TooLarge { limit_bytes } => problem.member("limit_bytes", *limit_bytes),
            _ => problem,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{convert::Infallible, io};

    use futures_util::stream;

    use super::*;

    fn of_unknown_length(bytes: &'static [u8]) -> Body {
        Body::from_stream(stream::iter([Ok::<_, Infallible>(bytes)]))
    }

    async fn read_4(body: Body) -> Result<Bytes, BodyError> {
        let read = read(&HeaderMap::new(), body, 4, Duration::from_secs(60)).await;
        read.map(Collected::to_bytes)
    }

    #[tokio::test]
    async fn body_is_accepted_up_to_the_limit() {
        let too_large = BodyError::TooLarge { limit_bytes: 4 };
        for body in [Body::from("four"), of_unknown_length(b"four")] {
            assert_eq!(read_4(body).await.unwrap(), "four");
        }
        for body in [Body::from("fifth"), of_unknown_length(b"fifth")] {
            assert_eq!(read_4(body).await.unwrap_err(), too_large);
        }
    }

    #[tokio::test]
    async fn limit_of_another_layer_is_reported_as_such() {
        for body in [Body::from("fourth"), of_unknown_length(b"fourth")] {
            let outer = Body::new(Limited::new(body, 3));
            assert_eq!(
                read_4(Body::new(outer)).await.unwrap_err(),
                BodyError::OuterLimit
            );
        }
    }

    #[tokio::test]
    async fn truncated_body_is_not_reported_as_too_large() {
        let parts = [Ok("a"), Err(io::Error::from(io::ErrorKind::BrokenPipe))];
        let broken = Body::from_stream(stream::iter(parts));
        assert_eq!(read_4(broken).await.unwrap_err(), BodyError::Malformed);
    }
}
