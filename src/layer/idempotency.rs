//! [`Idempotency`]: the options of a layer that accepts idempotency keys.

use std::{sync::Arc, time::Duration};

use axum::extract::OriginalUri;
use bytes::Bytes;
use derive_where::derive_where;
use futures_util::future::BoxFuture;
use http::{HeaderMap, HeaderName, HeaderValue, header, request::Parts};
use sha2::{Digest, Sha256};
use tokio::time::timeout;

use super::{
    refusal::Refusal,
    resource::{ResourceError, ResourceFrom, Resources},
};
use crate::{
    fence::{Claims, KeyedRequest, RecordId},
    idempotency::{IDEMPOTENCY_KEY, IdempotencyKey},
};

/// Options for the `Idempotency-Key` header, for
/// [`FenceLayer::idempotent`](super::FenceLayer::idempotent).
///
/// A write with a key is applied once, and each repetition gets the same status, body and [stored
/// headers](Self::stored_headers). The [guide](crate::guide::idempotency) describes when a client
/// may retry, and which requests it must not repeat.
///
/// A key belongs to a [scope](Self::scope), by default the resources of the request, and to a
/// [principal](Self::principal), by default the `Authorization` header. The same text is a
/// different key in each scope. A repetition must have the same method, path, query, resources and
/// body. Otherwise the layer refuses the repetition with 422.
///
/// A middleware that compresses responses belongs outside of the fence. Inside, a client gets the
/// stored response in the encoding of the first request.
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
#[derive_where(Debug)]
pub struct Idempotency {
    required: bool,
    ttl: Duration,
    wait: Option<Duration>,
    #[derive_where(skip)]
    scope: Option<Arc<Scope>>,
    #[derive_where(skip)]
    principal: Option<Arc<Principal>>,
    pub(super) response_limit_bytes: usize,
    pub(super) stored_headers: Arc<[HeaderName]>,
}

impl Idempotency {
    /// Accepts writes with and without a key. A write without a key is handled as if the layer did
    /// not have this option.
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
                header::CONTENT_DISPOSITION,
                header::CONTENT_ENCODING,
                header::CONTENT_LANGUAGE,
                header::CONTENT_TYPE,
                header::ETAG,
                header::LAST_MODIFIED,
                header::LOCATION,
                header::VARY,
                header::X_CONTENT_TYPE_OPTIONS,
            ]),
        }
    }

    /// Refuses writes without a key, with 400.
    #[must_use]
    pub fn required() -> Self {
        Self {
            required: true,
            ..Self::optional()
        }
    }

    /// Sets how long the record of a key is kept. Default: 24 h. Maximum: 100 years. Minimum: the
    /// longest time that a transaction may take (35 seconds for one resource by default), but at
    /// most a day, so that a concurrent request with the key finds the record.
    ///
    /// After that time, a request with the same key is a new write. Only the single use of its
    /// token then prevents a second write.
    #[must_use]
    pub const fn ttl(mut self, ttl: Duration) -> Self {
        self.ttl = ttl;
        self
    }

    /// Sets how long a request waits for a concurrent request with the same key. Default: the
    /// fence's [`lock_timeout`](crate::FenceBuilder::lock_timeout). Minimum: 1 ms.
    ///
    /// While a request waits for a request of another process, the waiting request holds a
    /// connection of the pool. On SQLite, a write waits for all other writes. The fence's
    /// `lock_timeout` applies to that wait. If that timeout passes, the response is `fence-busy`.
    #[must_use]
    pub const fn wait(mut self, limit: Duration) -> Self {
        self.wait = Some(limit);
        self
    }

    /// Sets the scope of the keys, in addition to the [principal](Self::principal). Scopes do not
    /// share keys. Default: the resources of the request.
    ///
    /// Whatever the scope is, a repetition must name the same resources.
    #[must_use]
    pub fn scope(mut self, scope: impl ResourceFrom) -> Self {
        self.scope = Some(Arc::new(move |parts| {
            let scope = scope.clone();
            Box::pin(async move { scope.resources_from(parts).await })
        }));
        self
    }

    /// Sets the function that returns the principal of a request, as arbitrary bytes. If it returns
    /// `None`, a request with a key is refused with 400 `idempotency-principal-required`. Default:
    /// the exact bytes of the `Authorization` header.
    ///
    /// A key belongs to one principal, and the layer never sends a stored response to another
    /// principal. By default, a request with cookies and no `Authorization` has no principal and is
    /// refused. A request with neither has the empty principal, so all such requests share one set
    /// of keys. The record contains only a SHA-256 digest of the principal.
    ///
    /// A replay does not reach the handler, so permissions that the handler checks are not checked
    /// again. Set this function in the following cases:
    ///
    /// - Cookies or client certificates identify the principal. Return the identity that an
    ///   authentication layer outside of this layer has stored in the request's extensions.
    /// - `Authorization` may change between two attempts of a client, for example because an access
    ///   token expires. Under a different principal, a repetition is a new request.
    /// - `Authorization` uses the scheme `Basic`. Otherwise the record contains a SHA-256 digest
    ///   that covers the password.
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
    ///     user.map(|user| user.name.clone())
    /// });
    /// # let _ = keys;
    /// ```
    #[must_use]
    pub fn principal<F, P>(mut self, principal: F) -> Self
    where
        F: Fn(&Parts) -> Option<P> + Send + Sync + 'static,
        P: AsRef<[u8]>,
    {
        let digest = move |parts: &Parts| Some(Sha256::digest(principal(parts)?.as_ref()).into());
        self.principal = Some(Arc::new(digest));
        self
    }

    /// Sets the maximum length of a response's body, in bytes. Default: 64 KiB.
    ///
    /// If the handler's response is longer, the write is rolled back and the client gets a 500,
    /// because a write without a stored response could not be repeated safely.
    #[must_use]
    pub const fn response_limit_bytes(mut self, limit: usize) -> Self {
        self.response_limit_bytes = limit;
        self
    }

    /// Sets which response headers are stored. Default: `Cache-Control`, `Content-Disposition`,
    /// `Content-Encoding`, `Content-Language`, `Content-Type`, `ETag`, `Last-Modified`, `Location`,
    /// `Vary`, `X-Content-Type-Options`.
    ///
    /// The first response contains all of its headers, and a replay contains only the stored ones.
    #[must_use]
    pub fn stored_headers(mut self, names: impl IntoIterator<Item = HeaderName>) -> Self {
        self.stored_headers = names.into_iter().collect();
        self
    }

    /// Returns the record id of the request's key. Returns `None` if the request has no key and the
    /// layer does not require one.
    pub(super) async fn record_of(
        &self,
        parts: &mut Parts,
        claims: &Claims,
        answer_timeout: Duration,
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
                let names = timeout(answer_timeout, scope(parts)).await;
                let names = names.unwrap_or(Err(ResourceError::Unavailable))?;
                if names.as_slice().is_empty() {
                    // Otherwise all requests that name no scope would share their keys.
                    return Err(ResourceError::Nothing.into());
                }
                digest("scope", names.as_slice())
            }
            None => resources_digest(claims),
        };
        let principal = match &self.principal {
            Some(principal) => principal(parts).ok_or(Refusal::PrincipalRequired)?,
            None => authorization(&parts.headers)?,
        };
        let scope = Sha256::new().chain_update(scope).chain_update(principal);
        let scope = scope.finalize().into();
        let key = key.as_str().to_owned();
        Ok(Some(RecordId { scope, key }))
    }

    /// Returns the request under its idempotency key, with the fingerprint by which a repetition is
    /// recognized.
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

/// Function that returns the names of a request's scope.
type Scope = dyn Fn(&mut Parts) -> BoxFuture<'_, Result<Resources, ResourceError>> + Send + Sync;

/// Function that returns a digest of a request's principal.
type Principal = dyn Fn(&Parts) -> Option<[u8; 32]> + Send + Sync;

/// Returns a digest of all field lines of `Authorization`, each preceded by its length. If the
/// request has cookies, and no `Authorization` or an empty one, the cookies may identify the
/// principal. Only the application can interpret them, so the request is refused.
fn authorization(headers: &HeaderMap) -> Result<[u8; 32], Refusal> {
    let mut lines = headers.get_all(header::AUTHORIZATION).iter();
    if headers.contains_key(header::COOKIE) && lines.all(HeaderValue::is_empty) {
        return Err(Refusal::PrincipalRequired);
    }
    let mut hash = Sha256::new();
    for line in headers.get_all(header::AUTHORIZATION) {
        hash.update((line.len() as u64).to_be_bytes());
        hash.update(line.as_bytes());
    }
    Ok(hash.finalize().into())
}

fn resources_digest(claims: &Claims) -> [u8; 32] {
    digest("resources", claims.iter().map(|claim| &claim.resource))
}

/// Returns a digest that does not depend on the order of the names. The separator is a line break,
/// which no name contains.
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

/// Returns a digest of the method, path, query, resources and body. If two requests have the same
/// digest, the second is a repetition. The token is not part of the digest, because a client that
/// received no response may retry under a new lease.
fn fingerprint(parts: &Parts, claims: &Claims, body: &Bytes) -> [u8; 32] {
    // Inside a nested router, the path of `parts.uri` lacks the prefix of the router.
    let whole = parts.extensions.get::<OriginalUri>();
    let uri = whole.map_or(&parts.uri, |OriginalUri(uri)| uri);
    let mut hash = Sha256::new_with_prefix(parts.method.as_str());
    // Neither a method nor a path contains a space.
    for text in [uri.path(), uri.query().unwrap_or("\n")] {
        hash.update(b" ");
        hash.update(text);
    }
    hash.update(b" ");
    hash.update(resources_digest(claims));
    hash.update(body);
    hash.finalize().into()
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
    fn different_requests_have_different_hashes() {
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
