//! Wrappers of the bodies of a request and of its response. They report to the connection when the
//! request ends.

use std::{
    future::poll_fn,
    pin::Pin,
    sync::{Arc, atomic::Ordering::SeqCst},
    task::{Context, Poll, ready},
    time::Duration,
};

use axum::body::Body;
use bytes::Bytes;
use http_body::{Body as _, Frame, SizeHint};
use hyper::body::Incoming;
use tokio::{
    runtime::Handle,
    time::{Instant, timeout},
};

use super::phase::{Phase, State};

/// A request that is in progress until the last part of its response is in a buffer.
pub(super) struct Answering(Arc<State>);

impl Answering {
    pub(super) fn new(state: &Arc<State>) -> Self {
        Self(Arc::clone(state))
    }

    /// Returns the body of the response, which keeps the request in progress.
    pub(super) fn until_sent(self, body: Body) -> Answer {
        Answer {
            body,
            _answering: self,
        }
    }
}

impl Drop for Answering {
    fn drop(&mut self) {
        let mut phase = self.0.phase();
        let since = match *phase {
            Phase::Sending(since) => since,
            _ => Instant::now(),
        };
        *phase = Phase::Flushing(since);
    }
}

/// Counts an unread body of a connection until it is dropped.
struct Unread(Arc<State>);

impl Unread {
    fn new(state: &Arc<State>) -> Self {
        state.unread.fetch_add(1, SeqCst);
        Self(Arc::clone(state))
    }
}

impl Drop for Unread {
    fn drop(&mut self) {
        let is_last = self.0.unread.fetch_sub(1, SeqCst) == 1;
        if is_last && matches!(*self.0.phase(), Phase::Flushing(_)) {
            self.0.drained.notify_one();
        }
    }
}

/// The body of a request. If it is dropped unread, a task reads the rest for at most a second.
/// Otherwise the connection would be closed with unread bytes, which resets it, and the client
/// could lose the response.
pub(super) struct RequestBody {
    /// `None` at the end of the body.
    rest: Option<(Incoming, Unread)>,
    /// False if the client waits for `100 Continue` before it sends the body.
    may_drain: bool,
}

impl RequestBody {
    /// The maximum number of bytes that are read after the body was dropped, and the timeout for
    /// reading them.
    const REST: (usize, Duration) = (64 * 1024, Duration::from_secs(1));

    pub(super) fn new(body: Incoming, state: &Arc<State>, may_drain: bool) -> Self {
        Self {
            rest: (!body.is_end_stream()).then(|| (body, Unread::new(state))),
            may_drain,
        }
    }
}

impl Drop for RequestBody {
    fn drop(&mut self) {
        let (mut left, within) = Self::REST;
        if self.may_drain
            && let Some((mut body, unread)) = self.rest.take()
            && let Ok(runtime) = Handle::try_current()
        {
            let rest = async move {
                while !body.is_end_stream()
                    && let Some(Ok(frame)) = poll_fn(|cx| Pin::new(&mut body).poll_frame(cx)).await
                    && let Some(rest) = left.checked_sub(frame.data_ref().map_or(0, Bytes::len))
                {
                    left = rest;
                }
                drop(unread);
            };
            runtime.spawn(timeout(within, rest));
        }
    }
}

impl http_body::Body for RequestBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let Some((body, _)) = &mut self.rest else {
            return Poll::Ready(None);
        };
        let frame = ready!(Pin::new(&mut *body).poll_frame(cx));
        if !matches!(frame, Some(Ok(_))) || body.is_end_stream() {
            self.rest = None;
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.rest.is_none()
    }

    fn size_hint(&self) -> SizeHint {
        let rest = self.rest.as_ref();
        rest.map_or_else(|| SizeHint::with_exact(0), |(body, _)| body.size_hint())
    }
}

/// The body of a response.
pub(super) struct Answer {
    body: Body,
    _answering: Answering,
}

impl http_body::Body for Answer {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
