//! A fenced read of a trace, step by step: a request to the layer, whose handler waits for each of its steps.

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
use tower_fence::{FenceLayer, PathParam, Resource};

use crate::support::database::{Fresh, TestDatabase};

#[derive(Debug, PartialEq)]
pub enum Event {
    /// The handler was called, and has not read yet.
    Called,
    HasRead(i64),
    Answered(StatusCode),
}

pub struct Reader {
    events: UnboundedReceiver<Event>,
    go: UnboundedSender<()>,
    request: JoinHandle<StatusCode>,
}

impl Reader {
    /// Sends a request, and waits until its handler is called, or for its answer.
    pub async fn look<DB: TestDatabase>(
        db: &Fresh<DB>,
        resource: &Resource,
        token: i64,
    ) -> (Self, Event) {
        let (said, events) = unbounded_channel();
        let (go, told) = unbounded_channel();
        let told = Arc::new(Mutex::new(told));
        let (pool, sku) = (db.pool.clone(), resource.clone());
        let handler = move || read(pool.clone(), sku.clone(), said.clone(), Arc::clone(&told));
        let app: Router = Router::new()
            .route("/{sku}", get(handler))
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

    /// Lets the handler go on to its next step.
    pub async fn go_on(&mut self) -> Event {
        self.go.send(()).unwrap();
        self.next().await
    }

    async fn next(&mut self) -> Event {
        tokio::select! {
            biased;
            Some(event) = self.events.recv() => event,
            status = &mut self.request => Event::Answered(status.unwrap()),
        }
    }
}

async fn read<DB: TestDatabase>(
    pool: Pool<DB>,
    sku: Resource,
    said: UnboundedSender<Event>,
    told: Arc<Mutex<UnboundedReceiver<()>>>,
) {
    let mut told = told.lock().await;
    said.send(Event::Called).unwrap();
    told.recv().await;
    let mut conn = pool.acquire().await.unwrap();
    let n = DB::number(
        &mut conn,
        &format!("SELECT n FROM stock WHERE sku = '{sku}'"),
    )
    .await;
    drop(conn);
    said.send(Event::HasRead(n.unwrap())).unwrap();
    told.recv().await;
}
