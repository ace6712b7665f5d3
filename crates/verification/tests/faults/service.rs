//! The service under test, which runs in three processes. Each is this program with the arguments
//! `service` and its [`Settings`].

use std::{
    net::SocketAddr,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use axum::{
    Json, Router,
    extract::{Path, State as Shared},
    http::StatusCode,
    routing::get,
};
use redis::sentinel::{SentinelClient, SentinelServerType};
use serde::{Deserialize, Serialize};
use sqlx::{
    PgConnection, PgPool,
    postgres::{PgConnectOptions, PgPoolOptions},
};
use tokio::net::TcpListener;
use tower_fence::{
    Fence, FenceLayer, Idempotency, PathParam, PgFencedTx,
    issuer::Issuer,
    layer::DatabaseError,
    lease::{Leases, PostgresLeases, RedisLeases},
};
use tower_fence_etcd::EtcdLeasesBuilder;
use tower_fence_redlock::QuorumLeasesBuilder;

use crate::{
    history::State,
    tables::{FENCED, Tables, UNFENCED},
};

/// The settings of a service.
#[derive(Debug, Deserialize, Serialize)]
pub struct Settings {
    pub addr: SocketAddr,
    /// The URL of the database, or of the pooler in front of it.
    pub database: String,
    /// The URL of the database without the pooler.
    pub direct: String,
    /// Whether the service reuses connections from write to write.
    pub reuses: bool,
    pub store: String,
    pub store_urls: Vec<String>,
}

/// The body of a write to each of the resources in the path.
#[derive(Debug, Deserialize, Serialize)]
pub struct Writing {
    pub entry: i64,
    /// The token of each resource. With the fence, the admitted tokens replace these tokens.
    pub tokens: Vec<i64>,
    pub amounts: Vec<i64>,
    /// The new state of each resource, which the client has computed from its read. If it is
    /// missing, the entry is added to the current state.
    pub back: Option<Vec<State>>,
}

/// Performs all writes of a request.
pub async fn write(
    conn: &mut PgConnection,
    tables: Tables,
    resources: &[String],
    writing: &Writing,
) -> sqlx::Result<()> {
    for (n, resource) in resources.iter().enumerate() {
        let back = writing.back.as_ref().map(|back| back[n]);
        let (entry, token, amount) = (writing.entry, writing.tokens[n], writing.amounts[n]);
        tables
            .write(conn, resource, entry, token, amount, back)
            .await?;
    }
    Ok(())
}

async fn fenced_write(
    Path(resources): Path<Vec<String>>,
    mut tx: PgFencedTx,
    Json(mut writing): Json<Writing>,
) -> Result<(), DatabaseError> {
    let admitted = tx.admitted().iter();
    writing.tokens = admitted.map(|one| one.token.get()).collect();
    Ok(write(&mut tx, FENCED, &resources, &writing).await?)
}

async fn unfenced_write(
    Shared(pool): Shared<PgPool>,
    Path(resources): Path<Vec<String>>,
    Json(writing): Json<Writing>,
) -> Result<(), StatusCode> {
    let written = async {
        let mut tx = pool.begin().await?;
        write(&mut tx, UNFENCED, &resources, &writing).await?;
        tx.commit().await
    };
    answered(written.await)
}

async fn read(
    tables: Tables,
    Shared(pool): Shared<PgPool>,
    Path(resources): Path<Vec<String>>,
) -> Result<Json<Vec<State>>, StatusCode> {
    let read = async {
        // Behind a pooler, a statement outside a transaction might be prepared on one server
        // connection and executed on another.
        let mut tx = pool.begin().await?;
        let states = tables.states(&mut tx, &resources).await?;
        tx.commit().await?;
        Ok(Json(states))
    };
    answered(read.await)
}

async fn time() -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    now.as_secs().to_string()
}

fn answered<T>(done: sqlx::Result<T>) -> Result<T, StatusCode> {
    done.map_err(|_| StatusCode::SERVICE_UNAVAILABLE)
}

fn routes(fence: &Fence<sqlx::Postgres>) -> Router {
    let fenced = get(|pool, path| read(FENCED, pool, path)).post(fenced_write);
    let unfenced = get(|pool, path| read(UNFENCED, pool, path)).post(unfenced_write);
    let keys = Idempotency::required().wait(Duration::from_secs(2));
    let one = || FenceLayer::new(fence.clone(), PathParam("one"));
    let both = FenceLayer::new(fence.clone(), [PathParam("one"), PathParam("two")]);
    let keyed = one().reusable().idempotent(keys);
    Router::new()
        .route("/time", get(time))
        .route("/fenced/{one}/{two}", fenced.clone().route_layer(both))
        .route("/fenced/{one}", fenced.clone().route_layer(one()))
        .route("/keyed/fenced/{one}", fenced.clone().route_layer(keyed))
        .route("/again/fenced/{one}", fenced.route_layer(one().reusable()))
        .route("/unfenced/{one}/{two}", unfenced.clone())
        .route("/unfenced/{one}", unfenced.clone())
        .route("/keyed/unfenced/{one}", unfenced.clone())
        .route("/again/unfenced/{one}", unfenced)
        .with_state(fence.pool().clone())
}

fn locks<L: Leases>(leases: L) -> Router {
    let issuer = Issuer::new(leases);
    let issuer = issuer.ttl_limits(Duration::from_millis(1)..=Duration::from_secs(60));
    Router::new().nest("/locks", issuer.router())
}

fn issuer(fence: &Fence<sqlx::Postgres>, settings: &Settings) -> Router {
    let urls: Vec<_> = settings.store_urls.iter().map(String::as_str).collect();
    // A busy machine may answer late.
    let wait = Duration::from_secs(2);
    let redis = || RedisLeases::builder(fence.clone()).command_timeout(wait);
    let redis = match settings.store.as_str() {
        "postgres" => {
            let listen = settings.direct.parse().unwrap();
            return locks(PostgresLeases::new(fence.clone()).listen_with(listen));
        }
        "quorum" => {
            let quorum = QuorumLeasesBuilder::new(fence.clone());
            let quorum = quorum.node_timeout(Duration::from_millis(800));
            return locks(
                quorum
                    .connect_lazy(&urls)
                    .unwrap()
                    .announced_to(fence.clone()),
            );
        }
        "etcd" => {
            let etcd = EtcdLeasesBuilder::new(fence.clone()).call_timeout(wait);
            let leases = etcd.connect_lazy(&urls).unwrap();
            return locks(leases.announced_to(fence.clone()));
        }
        "redis" => redis().connect_lazy(urls[0]),
        "sentinel" => {
            let master = SentinelServerType::Master;
            let client = SentinelClient::build(urls, String::from("the-master"), None, master);
            redis().with_sentinels(client.unwrap(), 0, "the-master")
        }
        "cluster" => redis().with_cluster(&urls, |client| client),
        other => panic!("no store {other:?}"),
    };
    locks(redis.unwrap().announced_to(fence.clone()))
}

/// Serves until the process is killed.
pub async fn serve(settings: &str) {
    let settings: Settings = serde_json::from_str(settings).unwrap();
    let is_pooled = settings.database != settings.direct;
    let mut options: PgConnectOptions = settings.database.parse().unwrap();
    if is_pooled {
        options = options.statement_cache_capacity(0);
    }
    let wait = Duration::from_secs(3);
    let pool = PgPoolOptions::new()
        .max_connections(12)
        .acquire_timeout(wait);
    let fence = Fence::builder()
        .pool_timeout(wait)
        .lock_timeout(wait)
        .hold_timeout(wait)
        .answer_timeout(wait)
        .transaction_pooling(is_pooled)
        .reuse_connections(settings.reuses)
        .build(pool.connect_lazy_with(options));
    let app = routes(&fence).merge(issuer(&fence, &settings));
    let listener = TcpListener::bind(settings.addr).await.unwrap();
    println!("listens");
    axum::serve(listener, app).await.unwrap();
}
