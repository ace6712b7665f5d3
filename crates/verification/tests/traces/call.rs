//! A request of a trace to the layer, whose handler lends its transaction to the trace.

use std::sync::{Arc, Weak};

use axum::{
    Extension, Router,
    body::{Body, to_bytes},
    http::{Request, StatusCode},
};
use tokio::{
    sync::{
        Mutex,
        mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel},
        oneshot,
    },
    task::JoinHandle,
};
use tower::ServiceExt;
use tower_fence::FencedTx;

use crate::support::database::TestDatabase;

#[derive(Debug, PartialEq)]
pub enum Event {
    /// The tokens were admitted, and the handler was called.
    Called,
    Answered(Answer),
}

#[derive(Debug, PartialEq)]
pub struct Answer {
    pub status: StatusCode,
    pub text: String,
    pub is_replay: bool,
}

/// The transaction of a handler, until the handler answers.
type Lent<DB> = Mutex<Option<FencedTx<DB>>>;

/// A handler that was called: its transaction, and the sender of its response.
type Handler<DB> = (Weak<Lent<DB>>, oneshot::Sender<(StatusCode, String)>);

/// The extension of a request, through which its handler lends its transaction to the test.
type Calls<DB> = UnboundedSender<Handler<DB>>;

pub struct Call<DB: TestDatabase> {
    calls: UnboundedReceiver<Handler<DB>>,
    handler: Option<Handler<DB>>,
    request: JoinHandle<Answer>,
}

impl<DB: TestDatabase> Call<DB> {
    /// Sends a request to a service whose handler is [`follow`].
    pub fn send(service: Router, mut request: Request<Body>) -> Self {
        let (called, calls): (Calls<DB>, _) = unbounded_channel();
        request.extensions_mut().insert(called);
        let request = tokio::spawn(async move {
            let response = service.oneshot(request).await.unwrap();
            let is_replay = response.headers().contains_key("idempotent-replayed");
            let status = response.status();
            let text = to_bytes(response.into_body(), usize::MAX).await.unwrap();
            Answer {
                status,
                text: String::from_utf8(text.into()).unwrap(),
                is_replay,
            }
        });
        Self {
            calls,
            handler: None,
            request,
        }
    }

    /// Waits for the next event: the call of the handler, or the response.
    pub async fn next(&mut self) -> Event {
        tokio::select! {
            biased;
            Some(handler) = self.calls.recv() => {
                self.handler = Some(handler);
                Event::Called
            }
            answer = &mut self.request => Event::Answered(answer.unwrap()),
        }
    }

    /// Waits for the response, which must be the next event.
    pub async fn next_answer(&mut self) -> Answer {
        match self.next().await {
            Event::Answered(answer) => answer,
            Event::Called => panic!("the handler was called"),
        }
    }

    /// Whether no event has happened yet.
    pub fn is_silent(&self) -> bool {
        self.calls.is_empty() && !self.request.is_finished()
    }

    /// Runs a statement that returns a number in the transaction of the handler.
    pub async fn run(&mut self, sql: &str) -> Option<i64> {
        let (lent, _) = self.handler.as_ref().unwrap();
        let lent = lent.upgrade().unwrap();
        let mut tx = lent.lock().await;
        DB::number(tx.as_mut().unwrap(), sql).await.ok()
    }

    /// Makes the handler answer, and waits for the response of the layer.
    pub async fn answer(&mut self, status: StatusCode, text: &str) -> Answer {
        self.order_answer(status, text);
        self.next_answer().await
    }

    /// Makes the handler answer, and does not wait.
    pub fn order_answer(&mut self, status: StatusCode, text: &str) {
        let (lent, response) = self.handler.take().unwrap();
        let lent = lent.upgrade().unwrap();
        drop(lent.try_lock().unwrap().take());
        response.send((status, text.to_owned())).unwrap();
    }

    /// Disconnects the client, while the handler has its transaction.
    pub async fn cancel(self) {
        // The handler does not answer before the request is cancelled.
        let _handler = self.handler;
        self.request.abort();
        assert!(self.request.await.unwrap_err().is_cancelled());
    }
}

/// The handler, which lends its transaction to the test, and leaves its response to it.
pub async fn follow<DB: TestDatabase>(
    Extension(calls): Extension<Calls<DB>>,
    tx: FencedTx<DB>,
) -> (StatusCode, String) {
    let lent = Arc::new(Mutex::new(Some(tx)));
    let (response, answer) = oneshot::channel();
    // Both channels fail only if the test has ended.
    let _ = calls.send((Arc::downgrade(&lent), response));
    let failed = (StatusCode::INTERNAL_SERVER_ERROR, String::new());
    answer.await.unwrap_or(failed)
}
