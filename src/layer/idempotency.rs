//! [`Idempotency`]: the options of a layer whose writes may be repeated under a key.

use std::{fmt, sync::Arc, time::Duration};

use axum::{extract::OriginalUri, response::Response};
use bytes::Bytes;
use futures_util::future::BoxFuture;
use http::{HeaderMap, HeaderName, header, request::Parts};
use sha2::{Digest, Sha256};

use super::{
    refusal::Refusal,
    resource::{ResourceError, ResourceFrom, Resources},
    stored::{UnstorableResponse, capture},
};
use crate::{
    fence::{Claims, KeyedRequest, RecordId, StoredResponse},
    idempotency::{IDEMPOTENCY_KEY, IdempotencyKey},
};

/// How a layer treats the `Idempotency-Key` header: for
/// [`FenceLayer::idempotent`](super::FenceLayer::idempotent).
///
/// A write with a key happens once and is answered the same way every time: the response is stored
/// in the transaction of the write, and a repetition gets it back with `Idempotent-Replayed: true`,
/// also after its token went stale. Only what was committed is stored: after a 4xx or a 5xx the
/// same key may try again. Such a try is a new write, whose body must not stem from a read under
/// an older token: see [`idempotency`](crate::idempotency).
///
/// A key belongs to its [scope](Self::scope), the resources where nothing else is said, and to its
/// [principal](Self::principal), by the `Authorization` header. A repetition is the same request
/// when method, path, query, resources and body are the same; otherwise it is refused with 422.
///
/// ```
/// use std::time::Duration;
/// use tower_fence::{PathParam, layer::Idempotency};
///
/// let keys = Idempotency::required()
///     .ttl(Duration::from_secs(3_600))
///     .scope(PathParam("tenant"))
///     .response_limit_bytes(16 * 1024);
/// # let _ = keys;
/// ```
#[derive(Clone)]
pub struct Idempotency {
    required: bool,
    ttl: Duration,
    wait: Option<Duration>,
    scope: Option<Arc<dyn Scope>>,
    principal: Option<Arc<Principal>>,
    pub(super) response_limit_bytes: usize,
    pub(super) stored_headers: Arc<[HeaderName]>,
}

impl Idempotency {
    /// A write may have a key. One that has none is treated as if the layer had no keys at all.
    #[must_use]
    pub fn optional() -> Self {
        Self {
            required: false,
            ttl: Duration::from_secs(24 * 60 * 60),
            wait: None,
            scope: None,
            principal: None,
            response_limit_bytes: 64 * 1024,
            stored_headers: Arc::new([
                header::CACHE_CONTROL,
                header::CONTENT_ENCODING,
                header::CONTENT_LANGUAGE,
                header::CONTENT_TYPE,
                header::ETAG,
                header::LAST_MODIFIED,
                header::LOCATION,
            ]),
        }
    }

    /// A write without a key is refused with 400.
    #[must_use]
    pub fn required() -> Self {
        Self {
            required: true,
            ..Self::optional()
        }
    }

    /// How long a key is remembered. Default: 24 h; at most 100 years.
    ///
    /// After that the same key is a new one: what still protects from a second write is that the
    /// token was single-use.
    #[must_use]
    pub const fn ttl(mut self, ttl: Duration) -> Self {
        self.ttl = ttl;
        self
    }

    /// How long to wait for a request with the same key that is under way. Default: the fence's
    /// [`lock_timeout`](crate::FenceBuilder::lock_timeout). At least 1 ms.
    ///
    /// For a request of another process the wait holds a connection of the pool. On SQLite, where a
    /// write waits for all others, the fence's `lock_timeout` decides then, and the answer is
    /// `fence-busy`.
    #[must_use]
    pub const fn wait(mut self, limit: Duration) -> Self {
        self.wait = Some(limit);
        self
    }

    /// What a key belongs to, beside the [principal](Self::principal): the same key in two scopes
    /// is two keys. Default: the resources of the request.
    ///
    /// Whatever it is, a repetition has to name the same resources.
    #[must_use]
    pub fn scope(mut self, scope: impl ResourceFrom) -> Self {
        self.scope = Some(Arc::new(scope));
        self
    }

    /// Identifies the principal of a request, as bytes of any form. A key belongs to one principal, and a stored answer
    /// is never given to another. Default: the `Authorization` header, byte by byte.
    ///
    /// By default a request with cookies and no `Authorization` is refused with 400 `idempotency-principal-required`. A
    /// request with neither has the empty principal: all such requests share their keys.
    ///
    /// A replay does not reach the handler, so rights that are checked there are not checked again. Name the principal
    ///
    /// - if cookies or client certificates identify it: from what authentication outside of the layer has put into the
    ///   extensions;
    /// - if `Authorization` may change between two attempts of a client, as an access token that expires does: under
    ///   another principal a repetition is a new request;
    /// - if `Authorization` is `Basic`. Only a SHA-256 of the principal is stored, and there it would be one of the password.
    ///
    /// ```
    /// use tower_fence::Idempotency;
    ///
    /// #[derive(Clone)]
    /// struct User {
    ///     name: String,
    /// }
    ///
    /// let keys = Idempotency::optional().principal(|parts| {
    ///     let user = parts.extensions.get::<User>();
    ///     user.map(|user| user.name.clone()).unwrap_or_default()
    /// });
    /// # let _ = keys;
    /// ```
    #[must_use]
    pub fn principal<F, P>(mut self, principal: F) -> Self
    where
        F: Fn(&Parts) -> P + Send + Sync + 'static,
        P: AsRef<[u8]>,
    {
        let digest = move |parts: &Parts| Sha256::digest(principal(parts).as_ref()).into();
        self.principal = Some(Arc::new(digest));
        self
    }

    /// The greatest length of a response's body, in bytes. Default: 64 KiB.
    ///
    /// A write whose response is longer is rolled back and answered with 500: without its record
    /// it could not be repeated safely.
    #[must_use]
    pub const fn response_limit_bytes(mut self, limit: usize) -> Self {
        self.response_limit_bytes = limit;
        self
    }

    /// Which headers of a response are stored; the first answer has them all, a replay only
    /// these. Default: `Cache-Control`, `Content-Encoding`, `Content-Language`, `Content-Type`,
    /// `ETag`, `Last-Modified`, `Location`.
    #[must_use]
    pub fn stored_headers(mut self, names: impl IntoIterator<Item = HeaderName>) -> Self {
        self.stored_headers = names.into_iter().collect();
        self
    }

    /// Reads which record the request is about; `None` where it has no key and needs none.
    pub(super) async fn record_of(
        &self,
        parts: &mut Parts,
        claims: &Claims,
    ) -> Result<Option<RecordId>, Refusal> {
        let Some(key) = IdempotencyKey::parse(parts.headers.get_all(IDEMPOTENCY_KEY))? else {
            return if self.required {
                Err(Refusal::KeyRequired)
            } else {
                Ok(None)
            };
        };
        let scope = match &self.scope {
            Some(scope) => {
                let names = scope.names(parts).await?;
                if names.as_slice().is_empty() {
                    // Or all that it names nothing for would share their keys.
                    return Err(ResourceError::Nothing.into());
                }
                digest("scope", names.as_slice())
            }
            None => resources(claims),
        };
        let principal = match &self.principal {
            Some(principal) => principal(parts),
            None => authorization(&parts.headers)?,
        };
        let scope = Sha256::new().chain_update(scope).chain_update(principal);
        let scope = scope.finalize().into();
        let key = key.as_str().to_owned();
        Ok(Some(RecordId { scope, key }))
    }

    /// Reads a response to its end, for its record.
    pub(super) async fn capture(
        &self,
        response: Response,
    ) -> Result<(Response, StoredResponse), UnstorableResponse> {
        capture(response, self.response_limit_bytes, &self.stored_headers).await
    }

    pub(super) fn keyed(
        &self,
        id: RecordId,
        parts: &Parts,
        claims: &Claims,
        body: &Bytes,
    ) -> KeyedRequest {
        KeyedRequest {
            id,
            fingerprint: fingerprint(parts, claims, body),
            ttl: self.ttl,
            wait: self.wait,
        }
    }
}

/// Who has sent a request, as a digest.
type Principal = dyn Fn(&Parts) -> [u8; 32] + Send + Sync;

/// A digest of all field lines of `Authorization`, each with its length in front. If there is none, cookies may say who
/// sends the request, and only the application can read those.
fn authorization(headers: &HeaderMap) -> Result<[u8; 32], Refusal> {
    if headers.contains_key(header::COOKIE) && !headers.contains_key(header::AUTHORIZATION) {
        return Err(Refusal::PrincipalRequired);
    }
    let mut hash = Sha256::new();
    for line in headers.get_all(header::AUTHORIZATION) {
        hash.update((line.len() as u64).to_be_bytes());
        hash.update(line.as_bytes());
    }
    Ok(hash.finalize().into())
}

fn resources(claims: &Claims) -> [u8; 32] {
    digest("resources", claims.iter().map(|claim| &claim.resource))
}

/// [`ResourceFrom`], without its type.
trait Scope: Send + Sync {
    fn names<'a>(&'a self, parts: &'a mut Parts)
    -> BoxFuture<'a, Result<Resources, ResourceError>>;
}

impl<R: ResourceFrom> Scope for R {
    fn names<'a>(
        &'a self,
        parts: &'a mut Parts,
    ) -> BoxFuture<'a, Result<Resources, ResourceError>> {
        Box::pin(self.resources_from(parts))
    }
}

/// The order of the names does not matter. A name has no line break.
fn digest<T: AsRef<str> + Ord>(kind: &str, names: impl IntoIterator<Item = T>) -> [u8; 32] {
    let mut names: Vec<_> = names.into_iter().collect();
    names.sort_unstable();
    let mut hash = Sha256::new_with_prefix(kind);
    for name in names {
        hash.update(b"\n");
        hash.update(name.as_ref());
    }
    hash.finalize().into()
}

/// What makes two requests the same: method, path, query, resources and body. Not the token: who got
/// no answer may come back under a new lease.
fn fingerprint(parts: &Parts, claims: &Claims, body: &Bytes) -> [u8; 32] {
    // Inside a nested router the path is what the nest has left of it.
    let whole = parts.extensions.get::<OriginalUri>();
    let uri = whole.map_or(&parts.uri, |OriginalUri(uri)| uri);
    let mut hash = Sha256::new_with_prefix(parts.method.as_str());
    // Neither a method nor a path has a space.
    for text in [uri.path(), uri.query().unwrap_or("\n")] {
        hash.update(b" ");
        hash.update(text);
    }
    hash.update(b" ");
    hash.update(resources(claims));
    hash.update(body);
    hash.finalize().into()
}

impl fmt::Debug for Idempotency {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Idempotency")
            .field("required", &self.required)
            .field("ttl", &self.ttl)
            .field("wait", &self.wait)
            .field("response_limit_bytes", &self.response_limit_bytes)
            .field("stored_headers", &self.stored_headers)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::token::{Resource, Token};

    #[test]
    fn the_defaults_are_as_documented() {
        let keys = Idempotency::optional();
        assert_eq!(keys.ttl, Duration::from_hours(24));
        assert_eq!(keys.response_limit_bytes, 65_536);
    }

    #[test]
    fn what_is_hashed_is_told_apart() {
        assert_ne!(digest("kind", ["ab", "c"]), digest("kind", ["a", "bc"]));
        let resource = Resource::new("sku-1").unwrap();
        let claims = Claims::one(resource, Token::new(1).unwrap());
        let of = |uri: &str| {
            let (parts, ()) = http::Request::post(uri).body(()).unwrap().into_parts();
            fingerprint(&parts, &claims, &Bytes::new())
        };
        let all = [of("/ab"), of("/ab?"), of("/a?b"), of("/?ab")];
        for (n, one) in all.iter().enumerate() {
            assert!(!all[..n].contains(one), "{n}");
        }
    }
}
