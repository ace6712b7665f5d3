//! Storage and replay of responses under an idempotency key.

use axum::{body::Body, response::Response};
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use http_body::Body as _;
use http_body_util::{BodyExt, LengthLimitError, Limited};

use crate::{fence::StoredResponse, idempotency::IDEMPOTENT_REPLAYED};

/// Reason why a response could not be stored.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum UnstorableResponse {
    /// The body is longer than the limit.
    #[error(
        "the response is longer than {limit_bytes} bytes; see `Idempotency::response_limit_bytes`"
    )]
    TooLarge {
        /// The limit, in bytes.
        limit_bytes: usize,
    },
    /// The body ended with an error.
    #[error("the body of the response ended with an error")]
    Broken,
    /// The body ended with trailers, as in gRPC. They cannot be stored.
    #[error("the response has trailers, which cannot be stored")]
    Trailers,
}

/// Reads a response body to its end, and returns the response and the copy to store.
pub(super) async fn capture(
    response: Response,
    limit_bytes: usize,
    stored_headers: &[HeaderName],
) -> Result<(Response, StoredResponse), UnstorableResponse> {
    let too_large = UnstorableResponse::TooLarge { limit_bytes };
    let (parts, body) = response.into_parts();
    if body.size_hint().lower() > limit_bytes as u64 {
        return Err(too_large);
    }
    let body = match Limited::new(body, limit_bytes).collect().await {
        Ok(collected)
            if collected
                .trailers()
                .is_some_and(|trailers| !trailers.is_empty()) =>
        {
            return Err(UnstorableResponse::Trailers);
        }
        Ok(collected) => collected.to_bytes(),
        Err(error) if error.is::<LengthLimitError>() => return Err(too_large),
        Err(_) => return Err(UnstorableResponse::Broken),
    };
    let stored = StoredResponse {
        status: parts.status.as_u16(),
        headers: write_headers(&parts.headers, stored_headers),
        body: body.clone(),
    };
    Ok((Response::from_parts(parts, Body::from(body)), stored))
}

/// Builds a response from its stored form.
pub(super) fn replay(stored: StoredResponse) -> Response {
    let mut response = Response::new(Body::from(stored.body));
    // This crate never writes an invalid status.
    *response.status_mut() =
        StatusCode::from_u16(stored.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    read_headers(&stored.headers, response.headers_mut());
    let replayed = HeaderValue::from_static("true");
    response.headers_mut().insert(IDEMPOTENT_REPLAYED, replayed);
    response
}

/// Writes lines of `name: value`. Neither part contains a line break.
fn write_headers(headers: &HeaderMap, names: &[HeaderName]) -> Vec<u8> {
    let mut lines = Vec::new();
    for (name, value) in headers.iter().filter(|(name, _)| names.contains(name)) {
        for part in [name.as_str().as_bytes(), b": ", value.as_bytes(), b"\n"] {
            lines.extend_from_slice(part);
        }
    }
    lines
}

/// Reads the lines that [`write_headers`] has written. Omits invalid lines.
fn read_headers(lines: &[u8], headers: &mut HeaderMap) {
    for line in lines.split(|byte| *byte == b'\n') {
        // The first colon ends the name.
        let mut halves = line.splitn(2, |byte| *byte == b':');
        if let (Some(name), Some(value)) = (halves.next(), halves.next())
            && let Ok(name) = HeaderName::from_bytes(name)
            && let Ok(value) = HeaderValue::from_bytes(value.strip_prefix(b" ").unwrap_or(value))
        {
            headers.append(name, value);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{convert::Infallible, future::ready, io};

    use futures_util::stream;
    use http_body_util::Full;

    use super::*;

    async fn capture_4(body: Body) -> Result<StoredResponse, UnstorableResponse> {
        let captured = capture(Response::new(body), 4, &[]).await;
        captured.map(|(_, stored)| stored)
    }

    #[tokio::test]
    async fn response_is_stored_up_to_the_limit() {
        // The length of a streamed body is unknown.
        let streamed =
            |bytes: &'static str| Body::from_stream(stream::iter([Ok::<_, Infallible>(bytes)]));
        for body in [Body::from("four"), streamed("four")] {
            assert_eq!(capture_4(body).await.unwrap().body, "four");
        }
        for body in [Body::from("fifth"), streamed("fifth")] {
            let refused = capture_4(body).await.err();
            let too_large = UnstorableResponse::TooLarge { limit_bytes: 4 };
            assert_eq!(refused, Some(too_large));
        }
    }

    #[tokio::test]
    async fn truncated_response_is_not_reported_as_too_large() {
        let parts = [Ok("a"), Err(io::Error::from(io::ErrorKind::BrokenPipe))];
        let refused = capture_4(Body::from_stream(stream::iter(parts)))
            .await
            .err();
        assert_eq!(refused, Some(UnstorableResponse::Broken));
    }

    #[tokio::test]
    async fn response_with_trailers_is_not_stored() {
        let mut trailers = HeaderMap::new();
        trailers.insert("grpc-status", HeaderValue::from_static("0"));
        let body = Full::from("four").with_trailers(ready(Some(Ok(trailers))));
        let refused = capture_4(Body::new(body)).await.err();
        assert_eq!(refused, Some(UnstorableResponse::Trailers));
    }

    #[test]
    fn stored_headers_are_restored_unchanged() {
        let (plain, odd) = (
            HeaderName::from_static("x-plain"),
            HeaderName::from_static("x-odd"),
        );
        let mut headers = HeaderMap::new();
        headers.append(&plain, HeaderValue::from_static("a: b"));
        headers.append(&plain, HeaderValue::from_static(""));
        headers.append(&odd, HeaderValue::from_bytes(b" \xff:").unwrap());
        headers.append("x-left-out", HeaderValue::from_static("secret"));
        // A name that is listed twice is stored once.
        let lines = write_headers(&headers, &[odd, plain.clone(), plain]);
        let mut read = HeaderMap::new();
        read_headers(&lines, &mut read);
        headers.remove("x-left-out");
        assert_eq!(read, headers);
    }
}
