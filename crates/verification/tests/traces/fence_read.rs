//! A fenced read of a trace: a request to the layer, whose handler executes one step at a time.

use std::sync::Arc;

use axum::{
    Router,
    body::Body,
    http::{Request, StatusCode},
    routing::get,
};
use sqlx::Pool;
use tokio::{
    sync::{
        Mutex,
        mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel},
    },
    task::JoinHandle,
};
use tower::ServiceExt;
use tower_fence::{FenceLayer, FencedTx, PathParam, Resource};

use crate::support::database::{Fresh, TestDatabase};

#[derive(Debug, PartialEq)]
pub enum Event {
    /// The token was admitted and the handler was called. It has not read yet.
    Called,
    HasRead(i64),
    Answered(StatusCode),
}

/// The connection with which a handler reads. The lock of the row protects reads on both
/// connections.
#[derive(Clone, Copy)]
pub enum ReadsBy {
    ItsTransaction,
    Pool,
}

pub struct Reader {
    events: UnboundedReceiver<Event>,
    go: UnboundedSender<()>,
    request: JoinHandle<StatusCode>,
}

impl Reader {
    /// Sends a request, and waits for the call of its handler or for its response.
    pub async fn admit<DB: TestDatabase>(
        db: &Fresh<DB>,
        resource: &Resource,
        token: i64,
        reads_by: ReadsBy,
    ) -> (Self, Event) {
        let (said, events) = unbounded_channel();
        let (go, permits) = unbounded_channel();
        let handler = Handler {
            pool: db.pool.clone(),
            sku: resource.clone(),
            reads_by,
            said,
            permits: Arc::new(Mutex::new(permits)),
        };
        let app: Router = Router::new()
            .route("/{sku}", get(move |tx: FencedTx<DB>| handler.read(tx)))
            .route_layer(FenceLayer::new(db.fence(), PathParam("sku")));
        let request = Request::get(format!("/{resource}")).header("Fencing-Token", token);
        let request = request.body(Body::empty()).unwrap();
        let request = tokio::spawn(async move { app.oneshot(request).await.unwrap().status() });
        let mut reader = Self {
            events,
            go,
            request,
        };
        let event = reader.next().await;
        (reader, event)
    }

    /// Lets the handler execute its next step.
    pub async fn go_on(&mut self) -> Event {
        self.go.send(()).unwrap();
        self.next().await
    }

    /// Disconnects the client.
    pub async fn cancel(self) {
        self.request.abort();
        assert!(self.request.await.unwrap_err().is_cancelled());
    }

    async fn next(&mut self) -> Event {
        tokio::select! {
            biased;
            Some(event) = self.events.recv() => event,
            status = &mut self.request => Event::Answered(status.unwrap()),
        }
    }
}

struct Handler<DB: TestDatabase> {
    pool: Pool<DB>,
    sku: Resource,
    reads_by: ReadsBy,
    said: UnboundedSender<Event>,
    permits: Arc<Mutex<UnboundedReceiver<()>>>,
}

impl<DB: TestDatabase> Handler<DB> {
    async fn read(self, mut tx: FencedTx<DB>) {
        let mut permits = self.permits.lock().await;
        self.said.send(Event::Called).unwrap();
        permits.recv().await;
        let sql = format!("SELECT n FROM stock WHERE sku = '{}'", self.sku);
        let n = match self.reads_by {
            ReadsBy::ItsTransaction => DB::number(&mut tx, &sql).await,
            ReadsBy::Pool => DB::number(&mut self.pool.acquire().await.unwrap(), &sql).await,
        };
        self.said.send(Event::HasRead(n.unwrap())).unwrap();
        permits.recv().await;
    }
}

impl<DB: TestDatabase> Clone for Handler<DB> {
    fn clone(&self) -> Self {
        Self {
            pool: self.pool.clone(),
            sku: self.sku.clone(),
            reads_by: self.reads_by,
            said: self.said.clone(),
            permits: Arc::clone(&self.permits),
        }
    }
}
