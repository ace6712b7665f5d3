//! Calls to etcd's HTTP gateway: one endpoint after the other, within one limit.
//!
//! 1. A call goes to the endpoint that answered last. Where that does not answer in its share of the time, or has
//!    no leader, the next one is asked, until the limit. So **a call may have its effect twice**, or have had it
//!    though it failed; whoever calls is prepared for that.
//! 2. A token of etcd's authentication is fetched when there is none, and again when etcd says that it is not valid.
//! 3. What etcd answers instead of a result is in the error. What it was told is not: neither password nor token.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};

use http::{StatusCode, header::AUTHORIZATION};
use reqwest::{Client, Response, Url};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::{
    sync::Mutex,
    time::{Instant, sleep, timeout_at},
};
use zeroize::Zeroizing;

use super::{
    endpoints::method,
    messages::{AuthAnswer, Refusal},
};
use crate::lease::{LeaseError, time::after};

/// The pause after each endpoint was asked in vain.
const PAUSE: Duration = Duration::from_millis(50);
/// The largest answer that is read: a thousand leases with the longest names and owners have less.
const MAX_ANSWER_BYTES: usize = 8 << 20;

// Codes of gRPC.
const DEADLINE_EXCEEDED: i64 = 4;
const NOT_FOUND: i64 = 5;
const UNAVAILABLE: i64 = 14;
const UNAUTHENTICATED: i64 = 16;

pub(super) struct Gateway {
    client: Client,
    endpoints: Box<[Url]>,
    /// The endpoint that answered last.
    current: AtomicUsize,
    credentials: Option<Credentials>,
    /// The token that is used now.
    token: Mutex<Option<Arc<str>>>,
    call_wait: Duration,
}

pub(super) struct Credentials {
    pub(super) name: String,
    pub(super) password: Zeroizing<String>,
}

impl Gateway {
    pub(super) fn new(
        client: Client,
        endpoints: Box<[Url]>,
        credentials: Option<Credentials>,
        call_wait: Duration,
    ) -> Self {
        Self {
            client,
            endpoints,
            current: AtomicUsize::new(0),
            credentials,
            token: Mutex::default(),
            call_wait,
        }
    }

    /// Calls a method. It may be called twice.
    pub(super) async fn call<T: DeserializeOwned>(
        &self,
        path: &str,
        body: &Value,
    ) -> Result<T, EtcdError> {
        let take = async |response| {
            let answer = read(response).await?;
            serde_json::from_slice(&answer).map_err(|_| Failure::Meaningless)
        };
        self.attempts(path, &body.to_string(), take).await
    }

    /// Calls a method that answers a stream, with all of its requests at once, and returns its messages.
    pub(super) async fn call_stream<T: DeserializeOwned>(
        &self,
        path: &str,
        requests: &[Value],
    ) -> Result<Vec<T>, EtcdError> {
        let take = async |response| {
            let answer = read(response).await?;
            let messages = answer.split(|byte| *byte == b'\n');
            let messages = messages.filter(|message| !message.is_empty());
            let messages = messages.map(serde_json::from_slice);
            let messages: Result<_, _> = messages.collect();
            messages.map_err(|_| Failure::Meaningless)
        };
        self.attempts(path, &lines(requests), take).await
    }

    /// Opens a stream that goes on. Its messages are lines.
    pub(super) async fn open(&self, path: &str, requests: &[Value]) -> Result<Stream, EtcdError> {
        let body = lines(requests);
        let opened = self.attempts(path, &body, async |response| Ok(response));
        Ok(Stream {
            response: opened.await?,
            read: vec![],
        })
    }

    /// Sends a request to one endpoint after the other, and takes in the answer.
    async fn attempts<T>(
        &self,
        path: &str,
        body: &str,
        take: impl AsyncFn(Response) -> Result<T, Failure>,
    ) -> Result<T, EtcdError> {
        let limit = after(self.call_wait);
        let count = self.endpoints.len();
        // Each has its share of the time, so that one that is silent leaves some to the others.
        let share = self.call_wait / u32::try_from(count).unwrap_or(u32::MAX);
        let mut renewed_token = false;
        let mut asked = 0;
        loop {
            let at = self.current.load(Relaxed) % count;
            let endpoint = &self.endpoints[at];
            let until = after(share).min(limit);
            let attempt = self.attempt(endpoint, path, body, &take);
            let failure = match timeout_at(until, attempt).await {
                Ok(Ok(answer)) => return Ok(answer),
                Ok(Err(failure)) => failure,
                Err(_) => Failure::Silent,
            };
            match &failure {
                // The token was used up, its user was changed, or a member has forgotten it.
                Failure::Refused(_, refusal) if is_token_refusal(refusal) && !renewed_token => {
                    renewed_token = true;
                    self.token.lock().await.take();
                    continue;
                }
                Failure::Refused(status, refusal) if !is_passing(*status, refusal) => {
                    return Err(EtcdError::new(endpoint, failure));
                }
                _ => {}
            }
            if Instant::now() >= limit {
                return Err(EtcdError::new(endpoint, failure));
            }
            // Whoever was asked meanwhile may know a better one already.
            let next = (at + 1) % count;
            let _ = self.current.compare_exchange(at, next, Relaxed, Relaxed);
            asked += 1;
            if asked % count == 0 {
                if after(PAUSE) >= limit {
                    return Err(EtcdError::new(endpoint, failure));
                }
                sleep(PAUSE).await;
            }
        }
    }

    async fn attempt<T>(
        &self,
        endpoint: &Url,
        path: &str,
        body: &str,
        take: &impl AsyncFn(Response) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        let token = self.token(endpoint).await?;
        take(self.post(endpoint, path, body.to_owned(), token).await?).await
    }

    async fn post(
        &self,
        endpoint: &Url,
        path: &str,
        body: String,
        token: Option<Arc<str>>,
    ) -> Result<Response, Failure> {
        let mut request = self.client.post(method(endpoint, path)).body(body);
        if let Some(token) = token {
            let mut value =
                http::HeaderValue::from_str(&token).map_err(|_| Failure::Meaningless)?;
            value.set_sensitive(true);
            request = request.header(AUTHORIZATION, value);
        }
        let response = request.send().await.map_err(Failure::request)?;
        let status = response.status();
        if status == StatusCode::OK {
            return Ok(response);
        }
        let refusal = serde_json::from_slice(&read(response).await?);
        Err(Failure::Refused(status, refusal.unwrap_or_default()))
    }

    /// The token to use; none where there is no user.
    async fn token(&self, endpoint: &Url) -> Result<Option<Arc<str>>, Failure> {
        let Some(Credentials { name, password }) = &self.credentials else {
            return Ok(None);
        };
        let mut token = self.token.lock().await;
        if token.is_none() {
            let body = json!({ "name": name, "password": password.as_str() }).to_string();
            let path = "/v3/auth/authenticate";
            let response = self.post(endpoint, path, body, None).await;
            let answer = read(response.map_err(Failure::without_message)?).await?;
            let answer: AuthAnswer =
                serde_json::from_slice(&answer).map_err(|_| Failure::Meaningless)?;
            *token = Some(answer.token.into());
        }
        Ok(token.clone())
    }
}

impl Gateway {
    /// The error for what another server than etcd has answered.
    pub(super) fn meaningless(&self) -> EtcdError {
        let at = self.current.load(Relaxed) % self.endpoints.len();
        EtcdError::new(&self.endpoints[at], Failure::Meaningless)
    }
}

/// A stream of messages, each a line of JSON.
pub(super) struct Stream {
    response: Response,
    /// What was read of the next message.
    read: Vec<u8>,
}

impl Stream {
    /// The next message; `None` where the stream has ended, or makes no sense.
    pub(super) async fn next<T: DeserializeOwned>(&mut self) -> Option<T> {
        loop {
            if let Some(end) = self.read.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.read.drain(..=end).collect();
                return serde_json::from_slice(&line).ok();
            }
            if self.read.len() > MAX_ANSWER_BYTES {
                return None;
            }
            self.read.extend(self.response.chunk().await.ok()??);
        }
    }
}

async fn read(mut response: Response) -> Result<Vec<u8>, Failure> {
    let mut answer = vec![];
    while let Some(chunk) = response.chunk().await.map_err(Failure::request)? {
        answer.extend(chunk);
        if answer.len() > MAX_ANSWER_BYTES {
            return Err(Failure::Meaningless);
        }
    }
    Ok(answer)
}

fn lines(requests: &[Value]) -> String {
    requests
        .iter()
        .map(|request| format!("{request}\n"))
        .collect()
}

/// Whether it is the token that is refused, and another one may do.
fn is_token_refusal(refusal: &Refusal) -> bool {
    // "revision of auth store is old": users were changed since.
    refusal.code == UNAUTHENTICATED || refusal.message.contains("auth store is old")
}

/// Whether another endpoint, or a later time, may do.
fn is_passing(status: StatusCode, refusal: &Refusal) -> bool {
    // Without a code it is not etcd that has answered.
    matches!(refusal.code, 0 | UNAVAILABLE | DEADLINE_EXCEEDED)
        || status == StatusCode::SERVICE_UNAVAILABLE
}

/// Why one endpoint did not do what it was asked.
#[derive(Debug)]
enum Failure {
    Request(reqwest::Error),
    Silent,
    Refused(StatusCode, Refusal),
    Meaningless,
}

impl Failure {
    fn request(error: reqwest::Error) -> Self {
        Self::Request(error.without_url())
    }

    /// What refuses a password may repeat it.
    fn without_message(self) -> Self {
        match self {
            Self::Refused(status, refusal) if !refusal.message.starts_with("etcdserver: ") => {
                let message = String::new();
                Self::Refused(status, Refusal { message, ..refusal })
            }
            failure => failure,
        }
    }
}

/// Why etcd could not be asked. The cause of a [`LeaseError::Unavailable`].
#[derive(Debug, thiserror::Error)]
#[error("etcd at {address} {what}")]
pub(super) struct EtcdError {
    address: String,
    what: What,
    source: Option<reqwest::Error>,
    /// The code of gRPC; 0 where etcd did not answer.
    code: i64,
}

#[derive(Debug)]
struct What(String);

impl fmt::Display for What {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl EtcdError {
    fn new(endpoint: &Url, failure: Failure) -> Self {
        let (what, source, code) = match failure {
            Failure::Request(error) => ("could not be asked".into(), Some(error), 0),
            Failure::Silent => ("did not answer in time".into(), None, 0),
            Failure::Meaningless => ("gave an answer that makes no sense".into(), None, 0),
            Failure::Refused(status, refusal) => {
                let message: String = refusal.message.chars().take(200).collect();
                let what = match message.is_empty() {
                    true => format!("answered with status {status}"),
                    false => format!("answered: {message}"),
                };
                (what, None, refusal.code)
            }
        };
        Self {
            address: address(endpoint),
            what: What(what),
            source,
            code,
        }
    }

    /// Whether there is no such thing: an etcd lease that has ended.
    pub(super) const fn is_not_found(&self) -> bool {
        self.code == NOT_FOUND
    }

    /// Whether etcd has answered that it does not do this.
    pub(super) const fn is_refusal(&self) -> bool {
        self.code != 0 && self.code != UNAVAILABLE && self.code != DEADLINE_EXCEEDED
    }

    /// Whether there is an etcd lease of this id already.
    pub(super) fn is_lease_there(&self) -> bool {
        self.what.0.contains("lease already exists")
    }
}

impl From<EtcdError> for LeaseError {
    fn from(error: EtcdError) -> Self {
        Self::unavailable(error)
    }
}

/// Host and port, without a user's name and password.
fn address(url: &Url) -> String {
    let host = url.host_str().unwrap_or_default();
    match url.port_or_known_default() {
        Some(port) => format!("{host}:{port}"),
        None => host.into(),
    }
}
