//! The service under test, which runs in three processes. Each is this program with the argument
//! `service`.

use std::{
    env,
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

/// The environment variables of a service.
pub mod variables {
    pub const ADDR: &str = "FAULTS_ADDR";
    pub const DATABASE_URL: &str = "FAULTS_DATABASE_URL";
    /// The URL of the database without the pooler.
    pub const LISTEN_URL: &str = "FAULTS_LISTEN_URL";
    /// The variable that is set if the service reuses connections from write to write.
    pub const REUSE: &str = "FAULTS_REUSE";
    pub const STORE: &str = "FAULTS_STORE";
    /// The URLs of the servers of the store, separated by spaces.
    pub const STORE_URLS: &str = "FAULTS_STORE_URLS";
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
        let (entry, amount) = (writing.entry, writing.amounts[n]);
        let position = match &writing.back {
            Some(back) => tables.write_back(conn, resource, back[n]).await?,
            None => tables.append(conn, resource, entry, amount).await?,
        };
        let token = writing.tokens[n];
        tables.log(conn, resource, entry, token, position).await?;
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
    pool: PgPool,
    resources: Vec<String>,
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
    let (pool, one) = (fence.pool().clone(), || PathParam("one"));
    let fenced_read = |Shared(pool): Shared<PgPool>, Path(resources): Path<Vec<String>>| {
        read(FENCED, pool, resources)
    };
    let unfenced_read = |Shared(pool): Shared<PgPool>, Path(resources): Path<Vec<String>>| {
        read(UNFENCED, pool, resources)
    };
    let fenced = get(fenced_read).post(fenced_write);
    let unfenced = get(unfenced_read).post(unfenced_write);
    let keys = Idempotency::required().wait(Duration::from_secs(2));
    let both = [one(), PathParam("two")];
    let reusable = || FenceLayer::new(fence.clone(), one()).reusable();
    Router::new()
        .route("/time", get(time))
        .route("/fenced/{one}/{two}", fenced.clone())
        .route_layer(FenceLayer::new(fence.clone(), both))
        .merge(
            Router::new()
                .route("/fenced/{one}", fenced.clone())
                .route_layer(FenceLayer::new(fence.clone(), one())),
        )
        .merge(
            Router::new()
                .route("/keyed/fenced/{one}", fenced.clone())
                .route_layer(reusable().idempotent(keys)),
        )
        .merge(
            Router::new()
                .route("/again/fenced/{one}", fenced)
                .route_layer(reusable()),
        )
        .route("/unfenced/{one}/{two}", unfenced.clone())
        .route("/unfenced/{one}", unfenced.clone())
        .route("/keyed/unfenced/{one}", unfenced.clone())
        .route("/again/unfenced/{one}", unfenced)
        .with_state(pool)
}

fn locks<L: Leases>(leases: L) -> Router {
    let issuer = Issuer::new(leases);
    let issuer = issuer.ttl_limits(Duration::from_millis(1)..=Duration::from_secs(60));
    Router::new().nest("/locks", issuer.router())
}

fn issuer(fence: &Fence<sqlx::Postgres>) -> Router {
    let (store, urls) = (variable(variables::STORE), variable(variables::STORE_URLS));
    let urls: Vec<_> = urls.split_whitespace().collect();
    // A busy machine may answer late.
    let wait = Duration::from_secs(2);
    let redis = || RedisLeases::builder(fence.clone()).command_timeout(wait);
    let redis = match store.as_str() {
        "postgres" => {
            let listen = variable(variables::LISTEN_URL).parse().unwrap();
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

fn variable(name: &str) -> String {
    env::var(name).unwrap_or_else(|_| panic!("{name} is not set"))
}

/// Serves until the process is killed.
pub async fn serve() {
    let (url, direct) = (
        variable(variables::DATABASE_URL),
        variable(variables::LISTEN_URL),
    );
    let is_pooled = url != direct;
    let mut options: PgConnectOptions = url.parse().unwrap();
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
        .reuse_connections(env::var(variables::REUSE).is_ok())
        .build(pool.connect_lazy_with(options));
    let app = routes(&fence).merge(issuer(&fence));
    let addr: SocketAddr = variable(variables::ADDR).parse().unwrap();
    let listener = TcpListener::bind(addr).await.unwrap();
    println!("listens");
    axum::serve(listener, app).await.unwrap();
}
