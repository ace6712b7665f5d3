//! [`HttpLeases`]: a client for the leases of an issuer, over HTTP.

use std::{fmt, net::IpAddr, sync::Arc, time::Duration};

use http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header::AUTHORIZATION};
use reqwest::{Method, RequestBuilder, Url, redirect::Policy};
use serde::de::DeserializeOwned;
use tokio::time::timeout;

use super::http_error::HttpError;
use crate::{
    announce::Announce,
    lease::{
        Acquire, Announced, Held, Lease, LeaseAdmin, LeaseError, LeaseId, Leases, Page,
        ReleaseGuard, Renew,
    },
    token::{Resource, Token},
    wire::{AcquireBody, BreakBody, LEASE_ID, LeaseBody, PageBody, RenewBody, StateBody, refusal},
};

/// Leases of a remote [issuer](crate::issuer), over HTTP.
///
/// [`LeaseAdmin::list`] and [`LeaseAdmin::break_lease`] work only if the issuer serves the
/// operators' routes. A client is cheap to clone.
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
pub struct HttpLeases(Arc<Remote>);

/// Remote issuer, and how its requests are sent.
#[derive(Clone)]
struct Remote {
    url: Url,
    client: reqwest::Client,
    headers: HeaderMap,
    answer_timeout: Duration,
}

impl HttpLeases {
    /// Creates a client of the issuer at `url`.
    ///
    /// The URL is the address at which the issuer's router is nested, for example
    /// `http://127.0.0.1:3000/locks`. For `https`, enable a TLS feature of `reqwest` in your own
    /// `Cargo.toml`. Without such a feature, every request to an `https` URL fails. The client does
    /// not follow redirects, because they could send lease ids to another server. It uses HTTP/1.1,
    /// so that a connection that was silently lost delays only one request. Unless the host of the
    /// URL is `localhost` or a loopback address, the client uses the proxy in `HTTP_PROXY` or
    /// `HTTPS_PROXY`.
    ///
    /// # Errors
    ///
    /// - [`HttpError::Url`] if `url` is not a valid http or https URL.
    /// - [`HttpError::Client`] if the HTTP client cannot be built.
    pub fn new(url: &str) -> Result<Self, HttpError> {
        let mut client = reqwest::Client::builder()
            .redirect(Policy::none())
            // Over HTTP/2, a connection that was silently lost would also delay each retry.
            .http1_only()
            .connect_timeout(Duration::from_secs(2))
            // After a burst, many connections are idle. If all of them were silently lost, the
            // retries over them would outlast a lease.
            .pool_idle_timeout(Duration::from_secs(5));
        if Url::parse(url).is_ok_and(|url| is_this_machine(&url)) {
            // A proxy would send the request to its own machine.
            client = client.no_proxy();
        }
        Self::with_client(url, client.build().map_err(HttpError::Client)?)
    }

    /// Creates a client like [`new`](Self::new), but from a `reqwest` client of the caller.
    ///
    /// Do not give the client a timeout shorter than [`Acquire::wait`], and do not let it follow
    /// redirects. Restrict it to HTTP/1.1 (`http1_only`). Over HTTP/2, all requests share one
    /// connection. If that connection was silently lost, or has as many waiting requests as the
    /// server permits, all renewals wait.
    ///
    /// # Errors
    ///
    /// Returns [`HttpError::Url`] if `url` is not a valid http or https URL.
    pub fn with_client(url: &str, client: reqwest::Client) -> Result<Self, HttpError> {
        let url = Url::parse(url).map_err(|_| HttpError::Url)?;
        if !matches!(url.scheme(), "http" | "https") || url.cannot_be_a_base() {
            return Err(HttpError::Url);
        }
        Ok(Self(Arc::new(Remote {
            url,
            client,
            headers: HeaderMap::new(),
            answer_timeout: Duration::from_secs(5),
        })))
    }

    /// Sets how long a response may take, in addition to [`Acquire::wait`]. Default: 5 s.
    #[must_use]
    pub fn answer_timeout(mut self, timeout: Duration) -> Self {
        Arc::make_mut(&mut self.0).answer_timeout = timeout;
        self
    }

    /// Adds `Authorization: Bearer …` with this secret to each request. Default: no such header.
    ///
    /// # Errors
    ///
    /// Returns [`HttpError::Header`] if the secret contains characters that a header cannot
    /// contain.
    pub fn bearer(self, secret: &str) -> Result<Self, HttpError> {
        let value = HeaderValue::try_from(format!("Bearer {secret}"));
        let mut value = value.map_err(|_| HttpError::Header)?;
        value.set_sensitive(true);
        Ok(self.header(AUTHORIZATION, value))
    }

    /// Adds this header to each request, and replaces any value that was set earlier.
    #[must_use]
    pub fn header(mut self, name: HeaderName, value: HeaderValue) -> Self {
        Arc::make_mut(&mut self.0).headers.insert(name, value);
        self
    }

    /// Announces each grant of these leases to `resources`, for example a `Fence`, before returning
    /// it.
    ///
    /// [`Announced`] describes the guarantee. The remote issuer chooses its tokens itself, so if
    /// the fence has already received a higher token, the request fails with
    /// [`LeaseError::Unavailable`].
    pub fn announced_to<A: Announce>(self, resources: A) -> Announced<Self, A> {
        Announced::new(self, resources)
    }

    /// Returns the issuer's URL with these segments appended.
    fn url(&self, segments: &[&str]) -> Result<Url, LeaseError> {
        let mut url = self.0.url.clone();
        let mut path = url.path_segments_mut().map_err(|()| HttpError::Url)?;
        path.pop_if_empty().extend(segments);
        drop(path);
        if let ["openapi.json"] = segments
            && let Some(parent) = url.path().strip_suffix(".json")
        {
            // An issuer may serve its OpenAPI document at the path with the dot.
            url.set_path(&format!("{parent}%2Ejson"));
        }
        Ok(url)
    }

    fn request(&self, method: Method, resource: &Resource) -> Result<RequestBuilder, LeaseError> {
        let url = self.url(&[segment(resource)?])?;
        Ok(self.0.client.request(method, url))
    }

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
        // Until the response arrives, this process cannot know whether the issuer has granted the
        // lease. If the caller has chosen the id, it may retry with it, so nothing is released.
        let mut unanswered = (!request.chosen_id)
            .then(|| ReleaseGuard::new(Arc::new(self.clone()), resource.clone(), id.clone()));
        let answer = self.send(sent, request.wait).await?;
        let granted = granted(resource, id, StatusCode::CREATED, &answer);
        if matches!(granted, Err(LeaseError::Held { .. })) && !request.wait.is_zero() {
            // The issuer keeps the position in the queue for three seconds, in case the client
            // retries. The release removes the position.
            if let Some(unanswered) = unanswered {
                let _ = unanswered.release().await;
            }
            return granted;
        }
        // If the issuer may have granted the lease, the guard releases it.
        if let Some(unanswered) = &mut unanswered
            && !granted.as_ref().is_err_and(LeaseError::may_be_granted)
        {
            unanswered.keep();
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
            let detail = "a remote issuer chooses its tokens itself";
            return Err(LeaseError::invalid("at_least", detail));
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
        if state.resource != *resource {
            let answered = state.resource;
            return Err(HttpError::OtherResource { answered }.into());
        }
        let held = state.into_held();
        held.map_err(|_| answer.unexpected().into())
    }
}

impl LeaseAdmin for HttpLeases {
    async fn list(&self, limit: usize, cursor: Option<&str>) -> Result<Page, LeaseError> {
        let mut url = self.url(&[])?;
        url.query_pairs_mut()
            .append_pair("limit", &limit.to_string());
        match cursor {
            None => {}
            // The issuer treats an empty cursor like a missing one, so it must not be sent.
            Some("") => return Err(LeaseError::invalid_cursor()),
            Some(cursor) => {
                url.query_pairs_mut().append_pair("cursor", cursor);
            }
        }
        let sent = self.0.client.get(url);
        let answer = self.send(sent, Duration::ZERO).await?;
        let page: PageBody = read(None, StatusCode::OK, &answer)?;
        Ok(page.into())
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

fn is_this_machine(issuer: &Url) -> bool {
    let host = issuer.host_str().unwrap_or_default();
    let address = host.trim_matches(['[', ']']).parse::<IpAddr>();
    host == "localhost" || address.is_ok_and(|address| address.is_loopback())
}

struct Answer {
    status: StatusCode,
    body: Vec<u8>,
}

impl Answer {
    fn unexpected(&self) -> HttpError {
        HttpError::unexpected(self.status, &self.body)
    }
}

/// Maximum size of a response, in bytes. A page of a thousand leases with the longest names is
/// smaller.
const BODY_LIMIT_BYTES: usize = 4 * 1024 * 1024;

async fn exchange(issuer: &Url, request: RequestBuilder) -> Result<Answer, HttpError> {
    let failed = |error| HttpError::request(issuer, error);
    let mut response = request.send().await.map_err(failed)?;
    let (status, mut body) = (response.status(), vec![]);
    while let Some(chunk) = response.chunk().await.map_err(failed)? {
        if body.len() + chunk.len() > BODY_LIMIT_BYTES {
            return Err(HttpError::unexpected(status, b""));
        }
        body.extend_from_slice(&chunk);
    }
    Ok(Answer { status, body })
}

/// Returns the name as a URL segment. Refuses `.` and `..`, which would change the path.
fn segment(resource: &Resource) -> Result<&str, LeaseError> {
    match resource.as_str() {
        "." | ".." => {
            let detail = "must not be . or .., which cannot be a URL segment";
            Err(LeaseError::invalid("resource", detail))
        }
        name => Ok(name),
    }
}

/// Returns the lease id as a header value that `Debug` does not show.
fn secret(id: &LeaseId) -> HeaderValue {
    // Every character of a lease id is valid in a header.
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
    // A lease under another id is not the lease that was requested.
    let lease = lease.into_lease(resource, id);
    lease.ok_or_else(|| answer.unexpected().into())
}

fn read<T: DeserializeOwned>(
    resource: Option<&Resource>,
    expected: StatusCode,
    answer: &Answer,
) -> Result<T, LeaseError> {
    succeeded(resource, expected, answer)?;
    serde_json::from_slice(&answer.body).map_err(|_| answer.unexpected().into())
}

/// Checks that a response has the expected status. Converts a refusal to a typed error.
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
        300..=399 | 401 | 403 | 404 | 405 | 407 | 410 => HttpError::refused(*status, body).into(),
        _ => HttpError::unexpected(*status, body).into(),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_hosts_of_this_machine_bypass_the_proxy() {
        for (url, expected) in [
            ("http://localhost:3000/locks", true),
            ("http://127.0.0.2/locks", true),
            ("http://[::1]:3000", true),
            ("http://10.0.0.1/locks", false),
            ("http://localhost.example.org", false),
        ] {
            assert_eq!(
                is_this_machine(&Url::parse(url).unwrap()),
                expected,
                "{url}"
            );
        }
    }
}
