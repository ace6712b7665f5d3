//! A request of a trace to the layer, whose handler executes one step at a time.

use std::sync::Arc;

use axum::{
    Extension, Router,
    body::{Body, to_bytes},
    http::{Request, StatusCode},
    response::{IntoResponse, Response},
};
use tokio::{
    sync::{
        Mutex,
        mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel},
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
    /// The result of a statement; `None` if it failed.
    Ran(Option<i64>),
    Answered(Answer),
}

#[derive(Debug, PartialEq)]
pub struct Answer {
    pub status: StatusCode,
    pub text: String,
    pub is_replay: bool,
}

enum Order {
    Run(String),
    Answer(StatusCode, String),
}

/// The channels of the handler of one request.
#[derive(Clone)]
pub struct Script {
    said: UnboundedSender<Event>,
    orders: Arc<Mutex<UnboundedReceiver<Order>>>,
}

pub struct Call {
    events: UnboundedReceiver<Event>,
    orders: UnboundedSender<Order>,
    request: JoinHandle<Answer>,
}

impl Call {
    /// Sends a request to a service whose handler is [`follow`].
    pub fn send(service: Router, mut request: Request<Body>) -> Self {
        let (said, events) = unbounded_channel();
        let (orders, received) = unbounded_channel();
        let orders_of_it = Arc::new(Mutex::new(received));
        request.extensions_mut().insert(Script {
            said,
            orders: orders_of_it,
        });
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
            events,
            orders,
            request,
        }
    }

    /// Waits for the next event: the call of the handler, the result of a statement, or the
    /// response.
    pub async fn next(&mut self) -> Event {
        tokio::select! {
            biased;
            Some(event) = self.events.recv() => event,
            answer = &mut self.request => Event::Answered(answer.unwrap()),
        }
    }

    /// Whether no event has happened yet.
    pub fn is_silent(&self) -> bool {
        self.events.is_empty() && !self.request.is_finished()
    }

    /// Makes the handler run a statement that returns a number.
    pub async fn run(&mut self, sql: &str) -> Option<i64> {
        self.orders.send(Order::Run(sql.to_owned())).unwrap();
        match self.next().await {
            Event::Ran(number) => number,
            other => panic!("{other:?}"),
        }
    }

    /// Makes the handler answer, and waits for the response of the layer.
    pub async fn answer(&mut self, status: StatusCode, text: &str) -> Answer {
        self.order_answer(status, text);
        match self.next().await {
            Event::Answered(answer) => answer,
            other => panic!("{other:?}"),
        }
    }

    /// Makes the handler answer, and does not wait.
    pub fn order_answer(&self, status: StatusCode, text: &str) {
        let answer = Order::Answer(status, text.to_owned());
        self.orders.send(answer).unwrap();
    }

    /// Disconnects the client.
    pub async fn cancel(self) {
        self.request.abort();
        assert!(self.request.await.unwrap_err().is_cancelled());
    }
}

/// The handler, which executes the commands of the test.
pub async fn follow<DB: TestDatabase>(script: Extension<Script>, mut tx: FencedTx<DB>) -> Response {
    let mut orders = script.orders.lock().await;
    script.said.send(Event::Called).unwrap();
    while let Some(order) = orders.recv().await {
        match order {
            Order::Run(sql) => {
                let number = DB::number(&mut tx, &sql).await.ok();
                script.said.send(Event::Ran(number)).unwrap();
            }
            Order::Answer(status, text) => return (status, text).into_response(),
        }
    }
    StatusCode::INTERNAL_SERVER_ERROR.into_response()
}
