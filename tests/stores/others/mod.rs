//! The example of the paused holder with third-party locks: a service over Postgres that accepts
//! their tokens, and the same service without the fence for comparison.

mod etcd;
mod zookeeper;

use axum::{
    Json, Router,
    extract::{Path, State},
    http::StatusCode,
    routing::get,
};
use serde::{Deserialize, Serialize};
use sqlx::{PgConnection, PgPool, Postgres};
use tokio::sync::watch;
use tower_fence::{Fence, FenceLayer, PathParam, PgFencedTx};

use crate::support::{
    database::{Fresh, TestDatabase},
    http::{Answer, Server},
    lock_servers::Holder,
    proxy::{Passage, Proxy, Sender},
};

pub struct Inventory {
    pub db: Fresh<Postgres>,
    pub fence: Fence<Postgres>,
    server: Server,
}

#[derive(Deserialize, Serialize)]
struct Stock {
    stock: i64,
}

async fn read(
    State(pool): State<PgPool>,
    Path(sku): Path<String>,
) -> Result<Json<Stock>, StatusCode> {
    let stock = sqlx::query_scalar("SELECT n FROM stock WHERE sku = $1").bind(sku);
    let stock = stock.fetch_optional(&pool).await.unwrap();
    let stock = stock.ok_or(StatusCode::NOT_FOUND)?;
    Ok(Json(Stock { stock }))
}

async fn set(conn: &mut PgConnection, sku: String, stock: i64) {
    sqlx::query("INSERT INTO stock VALUES ($1, $2) ON CONFLICT (sku) DO UPDATE SET n = excluded.n")
        .bind(sku)
        .bind(stock)
        .execute(conn)
        .await
        .unwrap();
}

async fn write(mut tx: PgFencedTx, Path(sku): Path<String>, Json(new): Json<Stock>) {
    set(&mut tx, sku, new.stock).await;
}

async fn write_unfenced(
    State(pool): State<PgPool>,
    Path(sku): Path<String>,
    Json(new): Json<Stock>,
) {
    set(&mut pool.acquire().await.unwrap(), sku, new.stock).await;
}

impl Inventory {
    /// Starts a service that accepts tokens of any issuer.
    pub async fn start() -> Self {
        let db = Postgres::fresh(8).await;
        let fence = db.fence();
        let layer = FenceLayer::new(fence.clone(), PathParam("sku"));
        let server = serve(&fence, layer).await;
        Self { db, fence, server }
    }

    /// Starts a service over the same fence that accepts only tokens of this database.
    pub async fn accepting_only_its_own_tokens(&self) -> Server {
        let layer = FenceLayer::new(self.fence.clone(), PathParam("sku"));
        serve(&self.fence, layer.issued_by_this_database()).await
    }

    pub fn url(&self) -> String {
        self.server.url("/inventory")
    }

    /// Writes without a holder program.
    pub async fn write(&self, sku: &str, token: i64) -> Answer {
        write_to(&self.server, sku, token).await
    }

    pub async fn stock(&self, sku: &str) -> i64 {
        let stock = format!("SELECT n FROM stock WHERE sku = '{sku}'");
        self.db.number(&stock).await
    }
}

pub async fn write_to(server: &Server, sku: &str, token: i64) -> Answer {
    let put = server.client.put(server.url(&format!("/inventory/{sku}")));
    let put = put.header("Fencing-Token", format!("{token};resource=\"{sku}\""));
    Answer::to(put.json(&Stock { stock: 1 })).await
}

async fn serve(fence: &Fence<Postgres>, layer: FenceLayer<Postgres, PathParam>) -> Server {
    let fenced = Router::new()
        .route("/{sku}", get(read).put(write))
        .route_layer(layer);
    let unfenced = Router::new().route("/{sku}", get(read).put(write_unfenced));
    let app = Router::new()
        .nest("/inventory", fenced)
        .nest("/unfenced", unfenced)
        .with_state(fence.pool().clone());
    Server::start(app).await
}

/// Runs the story of the paused holder with the fence and without it. The first holder is frozen
/// until the lock server has granted its lock to a second holder, which writes. Then the first
/// holder writes, too. Each takes one item from a stock of 100. With the fence, the late write is
/// refused. Without the fence, the late write is acknowledged, and the write of the second holder
/// is lost.
pub async fn refuses_the_paused_holder(
    first: impl Fn(&str, &str) -> Holder,
    end_session: impl AsyncFn(&str),
    second: impl Fn(&str, &str) -> Holder,
) {
    let inventory = Inventory::start().await;
    let story = async |path: &str, sku: &str| {
        // If a busy machine freezes the first holder too late, its write is delayed in the network.
        let (may_write, open) = watch::channel(false);
        let proxy = Proxy::judging(inventory.server.addr, move |sender, message| {
            let writes = sender == Sender::Client && message.starts_with(b"PUT ");
            Passage::Until(open.clone()).when(writes)
        })
        .await;
        let url = inventory.server.url(path);
        let mut first = first(sku, &proxy.url(&url));
        let first_token = first.token().await;
        first.freeze();
        end_session(sku).await;
        let (second_token, second) = second(sku, &url).finish().await;
        assert!(first_token < second_token);
        assert_eq!(second, 200);
        may_write.send_replace(true);
        first.go_on();
        (first.status().await, inventory.stock(sku).await)
    };
    let (fenced, unfenced) =
        tokio::join!(story("/inventory", "sku-1"), story("/unfenced", "sku-2"));
    // The status of the first holder, and the stock.
    assert_eq!(fenced, (412, 99));
    // Two writes were acknowledged, and one is lost.
    assert_eq!(unfenced, (200, 99));
}
