//! Calls to etcd's HTTP gateway, over all endpoints, within one timeout.
//!
//! 1. A call goes to the endpoint that responded last. If that endpoint does not respond within its
//!    share of the timeout, or has no leader, the call goes to the next endpoint. Therefore **a
//!    call may be executed twice**, or may be executed although it failed.
//! 2. One call at a time authenticates. The calls that wait for it share its token, or its failure.
//!    A token that etcd refuses is replaced once.
//! 3. An error contains etcd's response, but nothing of the request, so it contains neither the
//!    password nor the token.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};

use reqwest::{
    Client, Response, StatusCode, Url,
    header::{AUTHORIZATION, HeaderValue},
};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::{
    sync::Mutex,
    time::{Instant, sleep, timeout_at},
};
use zeroize::Zeroizing;

use crate::{
    endpoints::method,
    error::{EtcdError, Failure, Refusal},
    messages::AuthAnswer,
};

/// Pause after every endpoint has failed.
const PAUSE: Duration = Duration::from_millis(50);
/// Longest timeout. It can be added to any `Instant`.
const LONGEST_TIMEOUT: Duration = Duration::from_secs(365 * 24 * 60 * 60);
/// Maximum size of a response, in bytes. A page of leases with the longest names and owners is
/// smaller. With the default key prefix, the queue of a resource is smaller, too, if it contains
/// fewer than 6,000 requests.
const MAX_ANSWER_BYTES: usize = 8 << 20;

/// HTTP gateway of etcd, at all endpoints.
pub(crate) struct Gateway {
    client: Client,
    endpoints: Box<[Url]>,
    /// The index of the endpoint that responded last.
    current: AtomicUsize,
    /// Whether a call has succeeded.
    has_answered: AtomicBool,
    credentials: Option<Credentials>,
    session: Mutex<Session>,
    timeout: Duration,
}

/// User of etcd's authentication.
pub(crate) struct Credentials {
    pub(crate) name: String,
    pub(crate) password: Zeroizing<String>,
}

/// Endpoints to which a call is sent.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum To {
    /// One endpoint after the other, beginning at the current one, until one of them responds. The
    /// call may be executed twice.
    Any,
    /// Like [`Any`](Self::Any), but beginning at the endpoint with this number, modulo the number
    /// of endpoints.
    AnyFrom(usize),
    /// Only the current endpoint. If the outcome is unknown, the next call goes to the next
    /// endpoint.
    Current,
}

/// Outcome of the last authentication.
#[derive(Default)]
struct Session {
    token: Option<Arc<str>>,
    /// The last failed authentication.
    failed: Option<(Instant, Failure)>,
}

impl Gateway {
    pub(crate) fn new(
        client: Client,
        endpoints: Box<[Url]>,
        credentials: Option<Credentials>,
        timeout: Duration,
    ) -> Self {
        Self {
            client,
            endpoints,
            current: AtomicUsize::new(0),
            has_answered: AtomicBool::new(false),
            credentials,
            session: Mutex::default(),
            timeout: timeout.min(LONGEST_TIMEOUT),
        }
    }

    /// Returns the number of the endpoint to which the next call goes.
    pub(crate) fn current(&self) -> usize {
        self.current.load(Relaxed)
    }

    /// Calls a method, and parses the response.
    pub(crate) async fn call<T: DeserializeOwned>(
        &self,
        to: To,
        path: &str,
        body: &Value,
    ) -> Result<T, EtcdError> {
        let take = async |response| {
            let answer = read(response).await?;
            // The response of a stream, such as that of KeepAlive, has one line for each message.
            serde_json::from_slice(&answer).map_err(|_| Failure::Meaningless)
        };
        self.attempts(to, path, &body.to_string(), take).await
    }

    /// Opens a stream. Each request and each message is one line.
    pub(crate) async fn open(&self, path: &str, requests: &[Value]) -> Result<Stream, EtcdError> {
        let lines = requests.iter().map(|request| format!("{request}\n"));
        let body: String = lines.collect();
        let opened = self.attempts(To::Any, path, &body, async |response| Ok(response));
        Ok(Stream {
            response: opened.await?,
            read: vec![],
        })
    }

    /// Sends a request to these endpoints.
    async fn attempts<T>(
        &self,
        mut to: To,
        path: &str,
        body: &str,
        take: impl AsyncFn(Response) -> Result<T, Failure>,
    ) -> Result<T, EtcdError> {
        let deadline = Instant::now() + self.timeout;
        let count = self.endpoints.len();
        // Each endpoint has an equal share, so that a silent endpoint leaves time for the others.
        let share = self.timeout / u32::try_from(count).unwrap_or(u32::MAX);
        let (mut asked, mut has_new_token, mut may_have_run) = (0, false, false);
        // The last failure that names a cause or, if there is none, the last silent endpoint.
        let mut known = None;
        // The number of endpoints without a gateway that were tried one after the other.
        let mut without_gateway = 0;
        loop {
            let at = match to {
                To::AnyFrom(at) => at % count,
                To::Any | To::Current => self.current() % count,
            };
            let endpoint = &self.endpoints[at];
            let mut token = None;
            let attempt = async {
                token = self.token(endpoint).await?;
                let response = self.post(endpoint, path, body.to_owned(), token.as_deref());
                take(response.await?).await
            };
            let until = deadline.min(Instant::now() + share);
            let failure = match timeout_at(until, attempt).await {
                Ok(Ok(answer)) => {
                    self.has_answered.store(true, Relaxed);
                    return Ok(answer);
                }
                Ok(Err(failure)) => failure,
                Err(_) => Failure::Silent,
            };
            if failure.refuses_token() && !has_new_token {
                has_new_token = true;
                self.forget(token).await;
                continue;
            }
            without_gateway = match failure.lacks_gateway() {
                true => without_gateway + 1,
                false => 0,
            };
            // If a call has succeeded before, the gateway is enabled, but an ingress in front of it
            // may lack its route for a moment.
            if without_gateway == count && !self.has_answered.load(Relaxed) {
                let failure = Failure::NoGateway;
                return Err(EtcdError::new(endpoint, failure, may_have_run));
            }
            may_have_run |= to == To::Current && failure.may_pass();
            let (named, failure) = match failure {
                // The deadline may have cut this attempt short.
                Failure::Silent => known.take().unwrap_or((endpoint, failure)),
                failure => (endpoint, failure),
            };
            let error = |failure| EtcdError::new(named, failure, may_have_run);
            if !failure.may_pass() || Instant::now() >= deadline {
                return Err(error(failure));
            }
            let next = (at + 1) % count;
            if let To::AnyFrom(at) = &mut to {
                *at = next;
            } else {
                // Another call may have found a better endpoint in the meantime.
                let _ = self.current.compare_exchange(at, next, Relaxed, Relaxed);
            }
            if to == To::Current {
                return Err(error(failure));
            }
            asked += 1;
            if asked % count == 0 {
                if Instant::now() + PAUSE >= deadline {
                    return Err(error(failure));
                }
                sleep(PAUSE).await;
            }
            known = Some((named, failure));
            may_have_run = true;
        }
    }

    async fn post(
        &self,
        endpoint: &Url,
        path: &str,
        body: String,
        token: Option<&str>,
    ) -> Result<Response, Failure> {
        let mut request = self.client.post(method(endpoint, path)).body(body);
        if let Some(token) = token {
            let mut value = HeaderValue::from_str(token).map_err(|_| Failure::Meaningless)?;
            value.set_sensitive(true);
            request = request.header(AUTHORIZATION, value);
        }
        let response = request.send().await.map_err(Failure::request)?;
        let status = response.status();
        if status == StatusCode::OK {
            return Ok(response);
        }
        let refusal = Refusal::read(&read(response).await?);
        Err(Failure::refused(status, refusal))
    }

    /// Returns the token to send, if a user is set.
    async fn token(&self, endpoint: &Url) -> Result<Option<Arc<str>>, Failure> {
        let Some(credentials) = &self.credentials else {
            return Ok(None);
        };
        let asked_at = Instant::now();
        let mut session = self.session.lock().await;
        if let Some((failed_at, failure)) = &session.failed
            && *failed_at > asked_at
        {
            return Err(failure.clone());
        }
        if session.token.is_none() {
            match self.authenticate(endpoint, credentials).await {
                Ok(token) => session.token = Some(token),
                Err(failure) => {
                    session.failed = Some((Instant::now(), failure.clone()));
                    return Err(failure);
                }
            }
        }
        Ok(session.token.clone())
    }

    async fn authenticate(
        &self,
        endpoint: &Url,
        credentials: &Credentials,
    ) -> Result<Arc<str>, Failure> {
        let password = credentials.password.as_str();
        let body = json!({ "name": credentials.name, "password": password }).to_string();
        let response = self.post(endpoint, "/v3/auth/authenticate", body, None);
        let response = response.await.map_err(Failure::without_message)?;
        let answer: Result<AuthAnswer, _> = serde_json::from_slice(&read(response).await?);
        match answer {
            Ok(answer) => Ok(answer.token.into()),
            Err(_) => Err(Failure::Meaningless),
        }
    }

    /// Discards a token that was refused, unless another call has replaced it in the meantime.
    async fn forget(&self, refused: Option<Arc<str>>) {
        let mut session = self.session.lock().await;
        if session.token == refused {
            session.token = None;
        }
    }

    /// Returns the error for a response that does not come from etcd.
    pub(crate) fn meaningless(&self) -> EtcdError {
        let at = self.current.load(Relaxed) % self.endpoints.len();
        EtcdError::new(&self.endpoints[at], Failure::Meaningless, false)
    }
}

/// Stream of messages, each of which is a line of JSON.
pub(crate) struct Stream {
    response: Response,
    /// The bytes of the next message that have arrived.
    read: Vec<u8>,
}

impl Stream {
    /// Returns the next message, or `None` if the stream has ended or the message is invalid.
    pub(crate) async fn next<T: DeserializeOwned>(&mut self) -> Option<T> {
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

/// Reads the whole body of a response.
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
