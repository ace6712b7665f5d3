//! Leases from an issuer, over HTTP.

use std::{fmt, sync::Arc, time::Duration};

use http::{HeaderValue, StatusCode};
use reqwest::{Method, RequestBuilder, Url, redirect::Policy};
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::json;
use tokio::time::timeout;

use crate::{
    lease::{
        Acquire, GiveBack, Held, Lease, LeaseError, LeaseId, Leases, ListError, Operate, Owner,
        Page, Renew, whole_ms,
    },
    problem::ProblemType,
    token::{Resource, Token},
};

/// The leases of an [issuer](crate::issuer) elsewhere. Cheap to clone.
///
/// Listing and ending by force work where the issuer has its routes for operators.
#[derive(Clone)]
pub struct HttpLeases(Arc<Issuer>);

#[derive(Clone)]
struct Issuer {
    url: Url,
    client: reqwest::Client,
    answer_wait: Duration,
}

impl HttpLeases {
    /// The issuer at `url`, where its router is nested: `http://127.0.0.1:3000/locks`, for example.
    /// For `https`, enable a TLS feature of `reqwest` in your own `Cargo.toml`; without, each request
    /// to it fails. Redirections are not followed: they would carry lease ids elsewhere.
    ///
    /// # Errors
    ///
    /// [`HttpError::Url`] when this is no URL of HTTP; [`HttpError::Request`] when there is no
    /// client to be had.
    pub fn new(url: &str) -> Result<Self, HttpError> {
        let client = reqwest::Client::builder()
            .redirect(Policy::none())
            .connect_timeout(Duration::from_secs(2))
            .build();
        Self::with_client(url, client.map_err(HttpError::request)?)
    }

    /// As [`new`](Self::new), over a client of your own: with credentials in its default headers,
    /// for example. Do not give it a time-out that is shorter than the waits in line, and do not
    /// let it follow redirections.
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
            answer_wait: Duration::from_secs(5),
        })))
    }

    /// How long to wait for an answer, beyond the wait in line. Default: 5 s.
    #[must_use]
    pub fn answer_wait(mut self, limit: Duration) -> Self {
        Arc::make_mut(&mut self.0).answer_wait = limit;
        self
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
        let limit = wait.saturating_add(self.0.answer_wait);
        match timeout(limit, exchange(request)).await {
            Ok(answer) => Ok(answer?),
            Err(_) => Err(HttpError::NoAnswer.into()),
        }
    }
}

impl Leases for HttpLeases {
    async fn acquire(&self, resource: &Resource, request: Acquire) -> Result<Lease, LeaseError> {
        let id = request.lease_id.clone();
        let sent = self.request(Method::POST, resource)?.json(&json!({
            "ttl_ms": whole_ms(request.ttl),
            "wait_ms": ms(request.wait),
            "lock_delay_ms": ms(request.lock_delay),
            "owner": request.owner.as_ref().map(Owner::as_str),
            "lease_id": id.expose(),
        }));
        // Until there is an answer, the lease may be granted to somebody who does not hear of it.
        let mut unheard = GiveBack::new(Arc::new(self.clone()), resource.clone(), id.clone());
        if request.chosen_id {
            // Who chose the id may ask again.
            unheard.keep();
        }
        let answer = self.send(sent, request.wait).await?;
        let granted = granted(resource, id, StatusCode::CREATED, &answer);
        if !matches!(granted, Err(LeaseError::Unavailable(_))) {
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
        let sent = sent.header("Lease-Id", secret(id)).json(&json!({
            "ttl_ms": whole_ms(request.ttl),
            "new_token": request.new_token,
        }));
        let answer = self.send(sent, Duration::ZERO).await?;
        granted(resource, id.clone(), StatusCode::OK, &answer)
    }

    async fn release(&self, resource: &Resource, id: &LeaseId) -> Result<(), LeaseError> {
        let sent = self.request(Method::DELETE, resource)?;
        let sent = sent.header("Lease-Id", secret(id));
        let answer = self.send(sent, Duration::ZERO).await?;
        succeeded(Some(resource), StatusCode::NO_CONTENT, &answer)
    }

    async fn inspect(&self, resource: &Resource) -> Result<Option<Held>, LeaseError> {
        let sent = self.request(Method::GET, resource)?;
        let answer = self.send(sent, Duration::ZERO).await?;
        let state: State = read(Some(resource), StatusCode::OK, &answer)?;
        Ok(state.held.then_some(state.holder).flatten().map(Held::from))
    }
}

impl Operate for HttpLeases {
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
        let listed: Listed = match read(None, StatusCode::OK, &answer) {
            Err(LeaseError::Invalid { field, .. }) if field == "cursor" => {
                return Err(ListError::Cursor);
            }
            listed => listed?,
        };
        let leases = listed.leases.into_iter();
        Ok(Page {
            leases: leases.map(|of| (of.resource, of.holder.into())).collect(),
            cursor: listed.cursor,
        })
    }

    async fn break_lease(&self, resource: &Resource) -> Result<bool, LeaseError> {
        let url = self.url(&[segment(resource)?, "break"])?;
        let answer = self.send(self.0.client.post(url), Duration::ZERO).await?;
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

async fn exchange(request: RequestBuilder) -> Result<Answer, HttpError> {
    let mut response = request.send().await.map_err(HttpError::request)?;
    let (status, mut body) = (response.status(), vec![]);
    while let Some(chunk) = response.chunk().await.map_err(HttpError::request)? {
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

/// What the issuer says of a lease to its holder.
#[derive(Deserialize)]
struct Granted {
    resource: Resource,
    lease_id: String,
    token: Token,
    ttl_ms: u64,
}

/// What it says of a lease to everybody.
#[derive(Deserialize)]
struct Holder {
    token: Token,
    owner: Option<String>,
    ttl_ms: u64,
    waiters: u64,
}

#[derive(Deserialize)]
struct State {
    held: bool,
    #[serde(flatten)]
    holder: Option<Holder>,
}

#[derive(Deserialize)]
struct Listed {
    leases: Vec<ListedLease>,
    cursor: Option<String>,
}

#[derive(Deserialize)]
struct ListedLease {
    resource: Resource,
    #[serde(flatten)]
    holder: Holder,
}

impl From<Holder> for Held {
    fn from(holder: Holder) -> Self {
        Self {
            token: holder.token,
            owner: holder.owner.and_then(|owner| Owner::new(owner).ok()),
            ttl: Duration::from_millis(holder.ttl_ms),
            waiters: holder.waiters,
        }
    }
}

/// The members of all problems.
#[derive(Deserialize)]
struct Refused {
    #[serde(rename = "type")]
    kind: String,
    detail: Option<String>,
    field: Option<String>,
    retry_after_ms: Option<u64>,
    max_token: Option<i64>,
}

fn granted(
    resource: &Resource,
    id: LeaseId,
    expected: StatusCode,
    answer: &Answer,
) -> Result<Lease, LeaseError> {
    let granted: Granted = read(Some(resource), expected, answer)?;
    // Nothing but the very lease that was asked for makes a holder.
    if granted.resource != *resource || granted.lease_id != id.expose() {
        return Err(HttpError::Unexpected(answer.status).into());
    }
    Ok(Lease {
        resource: resource.clone(),
        id,
        token: granted.token,
        ttl: Duration::from_millis(granted.ttl_ms),
    })
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
    let unexpected = || HttpError::Unexpected(*status);
    let refused: Refused = serde_json::from_slice(body).map_err(|_| unexpected())?;
    let is = |kind: ProblemType| refused.kind == kind.uri();
    Err(match resource {
        Some(resource) if is(ProblemType::LockHeld) => LeaseError::Held {
            resource: resource.clone(),
            retry_after: Duration::from_millis(refused.retry_after_ms.unwrap_or(0)),
        },
        Some(resource) if is(ProblemType::LeaseLost) => LeaseError::Lost {
            resource: resource.clone(),
        },
        Some(resource) if is(ProblemType::TooManyWaiters) => LeaseError::TooManyWaiters {
            resource: resource.clone(),
        },
        Some(resource) if is(ProblemType::FenceExhausted) => LeaseError::Exhausted {
            resource: resource.clone(),
            max_token: refused.max_token.unwrap_or(Token::MAX.get()),
        },
        _ if is(ProblemType::InvalidRequest) => LeaseError::Invalid {
            field: refused.field.unwrap_or_default(),
            detail: refused.detail.unwrap_or_default(),
        },
        _ => unexpected().into(),
    })
}

/// Whole milliseconds; none stays none.
fn ms(time: Duration) -> u64 {
    if time.is_zero() { 0 } else { whole_ms(time) }
}

/// Why an issuer could not be asked. The cause of a [`LeaseError::Unavailable`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HttpError {
    /// This is no URL of HTTP.
    #[error("this is no http or https URL")]
    Url,
    /// The request failed.
    #[error("the issuer could not be asked")]
    Request(#[source] reqwest::Error),
    /// No answer came within the limit.
    #[error("the issuer did not answer in time")]
    NoAnswer,
    /// The answer is none of an issuer's: another service, a proxy, a store that is unavailable.
    #[error("the issuer answered with status {0}")]
    Unexpected(StatusCode),
}

impl HttpError {
    /// Without the URL, which may have a password in it.
    fn request(error: reqwest::Error) -> Self {
        Self::Request(error.without_url())
    }
}

impl From<HttpError> for LeaseError {
    fn from(error: HttpError) -> Self {
        Self::unavailable(error)
    }
}

impl fmt::Debug for HttpLeases {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HttpLeases")
            .field("host", &self.0.url.host_str())
            .field("answer_wait", &self.0.answer_wait)
            .finish_non_exhaustive()
    }
}
