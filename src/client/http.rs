//! Leases from an issuer, over HTTP.

use std::{fmt, sync::Arc, time::Duration};

use http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header::AUTHORIZATION};
use reqwest::{Method, RequestBuilder, Url, redirect::Policy};
use serde::de::DeserializeOwned;
use tokio::time::timeout;

use super::http_error::HttpError;
use crate::{
    announce::Announce,
    lease::{
        Acquire, Announced, Held, Lease, LeaseAdmin, LeaseError, LeaseId, Leases, ListError, Page,
        ReleaseGuard, Renew,
    },
    token::{Resource, Token},
    wire::{AcquireBody, BreakBody, LEASE_ID, LeaseBody, PageBody, RenewBody, StateBody, refusal},
};

/// The leases of an [issuer](crate::issuer) elsewhere. Cheap to clone.
///
/// Listing and ending by force work where the issuer has its routes for operators.
///
/// # Example
///
/// ```no_run
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// use tower_fence::client::{Holder, HttpLeases};
///
/// let leases = HttpLeases::new("http://127.0.0.1:3000/locks")?;
/// let lease = Holder::new(leases).acquire("sku-1").await?;
/// println!("{} may write with {}", lease.resource(), lease.fencing_token());
/// lease.release().await?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct HttpLeases(Arc<Issuer>);

#[derive(Clone)]
struct Issuer {
    url: Url,
    client: reqwest::Client,
    headers: HeaderMap,
    answer_timeout: Duration,
}

impl HttpLeases {
    /// The issuer at `url`, where its router is nested: `http://127.0.0.1:3000/locks`, for example.
    /// For `https`, enable a TLS feature of `reqwest` in your own `Cargo.toml`; without, each request
    /// to it fails. Redirections are not followed: they would carry lease ids elsewhere.
    ///
    /// # Errors
    ///
    /// [`HttpError::Url`] when this is no URL of HTTP; [`HttpError::Client`] when no
    /// client can be built.
    pub fn new(url: &str) -> Result<Self, HttpError> {
        let client = reqwest::Client::builder()
            .redirect(Policy::none())
            .connect_timeout(Duration::from_secs(2))
            .build();
        Self::with_client(url, client.map_err(HttpError::Client)?)
    }

    /// As [`new`](Self::new), over a client of your own. Do not give it a timeout that is shorter than the
    /// waits in the queue, and do not let it follow redirections.
    ///
    /// # Errors
    ///
    /// [`HttpError::Url`] when this is no URL of HTTP.
    pub fn with_client(url: &str, client: reqwest::Client) -> Result<Self, HttpError> {
        let url = Url::parse(url).map_err(|_| HttpError::Url)?;
        if !matches!(url.scheme(), "http" | "https") || url.cannot_be_a_base() {
            return Err(HttpError::Url);
        }
        Ok(Self(Arc::new(Issuer {
            url,
            client,
            headers: HeaderMap::new(),
            answer_timeout: Duration::from_secs(5),
        })))
    }

    /// The timeout of an answer, beyond the wait in the queue. Default: 5 s.
    #[must_use]
    pub fn answer_timeout(mut self, timeout: Duration) -> Self {
        Arc::make_mut(&mut self.0).answer_timeout = timeout;
        self
    }

    /// Sends `Authorization: Bearer …` with this secret along with each request. Default: none.
    ///
    /// # Errors
    ///
    /// [`HttpError::Header`] if no header can have the secret.
    pub fn bearer(self, secret: &str) -> Result<Self, HttpError> {
        let value = HeaderValue::try_from(format!("Bearer {secret}"));
        let mut value = value.map_err(|_| HttpError::Header)?;
        value.set_sensitive(true);
        Ok(self.header(AUTHORIZATION, value))
    }

    /// Sends this header along with each request, in place of any other value that was set before.
    #[must_use]
    pub fn header(mut self, name: HeaderName, value: HeaderValue) -> Self {
        Arc::make_mut(&mut self.0).headers.insert(name, value);
        self
    }

    /// These leases, each grant announced to `resources`, a `Fence`, before it is answered. What that
    /// promises: [`Announced`]. An issuer chooses its tokens itself, so a grant that the fence
    /// outranks is answered [`LeaseError::Unavailable`].
    pub fn announced_to<A: Announce>(self, resources: A) -> Announced<Self, A> {
        Announced::new(self, resources)
    }

    /// The URL of the issuer with these segments behind it.
    fn url(&self, segments: &[&str]) -> Result<Url, LeaseError> {
        let mut url = self.0.url.clone();
        let mut path = url.path_segments_mut().map_err(|()| HttpError::Url)?;
        path.pop_if_empty().extend(segments);
        drop(path);
        Ok(url)
    }

    fn request(&self, method: Method, resource: &Resource) -> Result<RequestBuilder, LeaseError> {
        let url = self.url(&[segment(resource)?])?;
        Ok(self.0.client.request(method, url))
    }

    /// Sends a request and reads its answer.
    async fn send(&self, request: RequestBuilder, wait: Duration) -> Result<Answer, LeaseError> {
        let limit = wait.saturating_add(self.0.answer_timeout);
        let request = request.headers(self.0.headers.clone());
        match timeout(limit, exchange(&self.0.url, request)).await {
            Ok(answer) => Ok(answer?),
            Err(_) => Err(HttpError::no_answer(&self.0.url).into()),
        }
    }
}

impl Leases for HttpLeases {
    async fn acquire(&self, resource: &Resource, request: Acquire) -> Result<Lease, LeaseError> {
        let id = request.lease_id.clone();
        let sent = self.request(Method::POST, resource)?;
        let sent = sent.json(&AcquireBody::from(&request));
        // Until there is an answer, the lease may be granted without this process hearing of it.
        let mut unheard = ReleaseGuard::new(Arc::new(self.clone()), resource.clone(), id.clone());
        if request.chosen_id {
            // A caller who chose the id may ask again.
            unheard.keep();
        }
        let answer = self.send(sent, request.wait).await?;
        let granted = granted(resource, id, StatusCode::CREATED, &answer);
        if matches!(granted, Err(LeaseError::Held { .. })) && !request.wait.is_zero() {
            // The issuer keeps its position for a moment, for a client that comes back.
            let _ = unheard.release().await;
            return granted;
        }
        if !matches!(
            granted,
            Err(LeaseError::Unavailable(_) | LeaseError::Misconfigured(_))
        ) {
            unheard.keep();
        }
        granted
    }

    async fn renew(
        &self,
        resource: &Resource,
        id: &LeaseId,
        request: Renew,
    ) -> Result<Lease, LeaseError> {
        if request.at_least.is_some() {
            return Err(LeaseError::Invalid {
                field: "at_least".into(),
                detail: "an issuer elsewhere chooses its tokens itself".into(),
            });
        }
        let sent = self.request(Method::PUT, resource)?;
        let sent = sent.header(LEASE_ID, secret(id));
        let sent = sent.json(&RenewBody::from(&request));
        let answer = self.send(sent, Duration::ZERO).await?;
        granted(resource, id.clone(), StatusCode::OK, &answer)
    }

    async fn release(&self, resource: &Resource, id: &LeaseId) -> Result<(), LeaseError> {
        let sent = self.request(Method::DELETE, resource)?;
        let sent = sent.header(LEASE_ID, secret(id));
        let answer = self.send(sent, Duration::ZERO).await?;
        succeeded(Some(resource), StatusCode::NO_CONTENT, &answer)
    }

    async fn inspect(&self, resource: &Resource) -> Result<Option<Held>, LeaseError> {
        let sent = self.request(Method::GET, resource)?;
        let answer = self.send(sent, Duration::ZERO).await?;
        let state: StateBody = read(Some(resource), StatusCode::OK, &answer)?;
        Ok(state.into())
    }
}

impl LeaseAdmin for HttpLeases {
    async fn list(&self, limit: usize, cursor: Option<&str>) -> Result<Page, ListError> {
        let mut url = self.url(&[])?;
        url.query_pairs_mut()
            .append_pair("limit", &limit.to_string());
        match cursor {
            None => {}
            // An issuer takes it for none.
            Some("") => return Err(ListError::Cursor),
            Some(cursor) => {
                url.query_pairs_mut().append_pair("cursor", cursor);
            }
        }
        let sent = self.0.client.get(url);
        let answer = self.send(sent, Duration::ZERO).await?;
        match read::<PageBody>(None, StatusCode::OK, &answer) {
            Ok(page) => Ok(page.into()),
            Err(LeaseError::Invalid { field, .. }) if field == "cursor" => Err(ListError::Cursor),
            Err(error) => Err(error.into()),
        }
    }

    async fn break_lease(
        &self,
        resource: &Resource,
        seen: Option<Token>,
    ) -> Result<bool, LeaseError> {
        let url = self.url(&[segment(resource)?, "break"])?;
        let request = self.0.client.post(url).json(&BreakBody { token: seen });
        let answer = self.send(request, Duration::ZERO).await?;
        match succeeded(Some(resource), StatusCode::NO_CONTENT, &answer) {
            Ok(()) => Ok(true),
            Err(LeaseError::Lost { .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }
}

/// A whole answer.
struct Answer {
    status: StatusCode,
    body: Vec<u8>,
}

/// The greatest length of an answer: a page of a thousand leases with the longest names is shorter.
const BODY_LIMIT_BYTES: usize = 4 * 1024 * 1024;

async fn exchange(issuer: &Url, request: RequestBuilder) -> Result<Answer, HttpError> {
    let failed = |error| HttpError::request(issuer, error);
    let mut response = request.send().await.map_err(failed)?;
    let (status, mut body) = (response.status(), vec![]);
    while let Some(chunk) = response.chunk().await.map_err(failed)? {
        if body.len() + chunk.len() > BODY_LIMIT_BYTES {
            return Err(HttpError::Unexpected(status));
        }
        body.extend_from_slice(&chunk);
    }
    Ok(Answer { status, body })
}

/// The name as a segment of a URL, which may be any but those that lead elsewhere.
fn segment(resource: &Resource) -> Result<&str, LeaseError> {
    match resource.as_str() {
        "." | ".." => Err(LeaseError::Invalid {
            field: "resource".into(),
            detail: "no URL can have this segment".into(),
        }),
        name => Ok(name),
    }
}

/// A header value that no debug output shows.
fn secret(id: &LeaseId) -> HeaderValue {
    // The alphabet of lease ids is that of headers.
    let value = HeaderValue::from_str(id.expose());
    let mut value = value.unwrap_or(HeaderValue::from_static(""));
    value.set_sensitive(true);
    value
}

fn granted(
    resource: &Resource,
    id: LeaseId,
    expected: StatusCode,
    answer: &Answer,
) -> Result<Lease, LeaseError> {
    let lease: LeaseBody = read(Some(resource), expected, answer)?;
    if lease.resource != *resource {
        let answered = lease.resource;
        return Err(HttpError::OtherResource { answered }.into());
    }
    // Nothing but the very lease that was asked for makes a holder.
    let lease = lease.into_lease(resource, id);
    lease.ok_or_else(|| HttpError::Unexpected(answer.status).into())
}

fn read<T: DeserializeOwned>(
    resource: Option<&Resource>,
    expected: StatusCode,
    answer: &Answer,
) -> Result<T, LeaseError> {
    succeeded(resource, expected, answer)?;
    serde_json::from_slice(&answer.body).map_err(|_| HttpError::Unexpected(answer.status).into())
}

/// The typed error of a problem.
fn succeeded(
    resource: Option<&Resource>,
    expected: StatusCode,
    Answer { status, body }: &Answer,
) -> Result<(), LeaseError> {
    if *status == expected {
        return Ok(());
    }
    let refused = refusal::read(body, resource);
    Err(refused.unwrap_or_else(|| match status.as_u16() {
        401 | 403 | 404 => HttpError::refused(*status, body).into(),
        _ => HttpError::Unexpected(*status).into(),
    }))
}

impl fmt::Debug for HttpLeases {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HttpLeases")
            .field("host", &self.0.url.host_str())
            .field("answer_timeout", &self.0.answer_timeout)
            .finish_non_exhaustive()
    }
}
