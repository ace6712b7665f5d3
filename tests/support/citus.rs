//! A Citus cluster of a coordinator and two workers, each on its own server.

use std::{
    net::SocketAddr,
    path::PathBuf,
    sync::{Arc, Weak},
};

use sqlx::{
    Connection, PgConnection, PgPool, Postgres,
    postgres::{PgConnectOptions, PgPoolOptions, PgRow},
};
use tokio::sync::Mutex;
use tower_fence::{Fence, FenceBuilder};

use super::{
    database::{TestDatabase, read},
    eventually,
    postgres::PostgresServer,
    standby::{Standby, execute},
    variable,
};

/// Access rules with which the nodes connect to each other without a password.
const ACCESS: &[u8] = b"host all all 127.0.0.1/32 trust\nhost replication all 127.0.0.1/32 trust\n";

const SETTINGS: &[&str] = &[
    "shared_preload_libraries=citus",
    "citus.node_conninfo=sslmode=disable",
    "citus.enable_statistics_collection=off",
    "max_prepared_transactions=50",
    // Citus runs a background process for each database.
    "max_worker_processes=64",
    "wal_level=logical",
];

/// The initial stock of each resource in `inventory`.
pub const STOCK: i64 = 1_000_000;

/// A cluster of three nodes, which stop on drop. Tests use its database `postgres`.
pub struct Cluster {
    pub coordinator: PostgresServer,
    pub workers: Vec<PostgresServer>,
}

impl Cluster {
    /// Starts a cluster without tables.
    pub async fn start() -> Self {
        let cluster = Self::apart().await;
        cluster.join().await;
        cluster
    }

    /// Starts the nodes without joining them, and without the extension on the coordinator.
    pub async fn apart() -> Self {
        let coordinator = node(0).await;
        let workers = vec![node(1).await, node(2).await];
        for worker in &workers {
            execute(worker, "CREATE EXTENSION citus").await;
        }
        Self {
            coordinator,
            workers,
        }
    }

    pub async fn join(&self) {
        let cluster = self;
        cluster
            .execute("CREATE EXTENSION IF NOT EXISTS citus")
            .await;
        let port = cluster.coordinator.addr().port();
        let set_host = format!("SELECT citus_set_coordinator_host('127.0.0.1', {port})");
        cluster.execute(&set_host).await;
        for worker in &cluster.workers {
            let port = worker.addr().port();
            let add = format!("SELECT citus_add_node('127.0.0.1', {port})");
            cluster.execute(&add).await;
        }
    }

    /// Starts a cluster with a fence and with the table `inventory`, which is distributed by `sku`.
    pub async fn with_fence() -> Self {
        let mut nodes = vec![];
        for node in stopped_nodes().await {
            nodes.push(PostgresServer::start_copy(node, &[], SETTINGS).await);
        }
        let ports: Vec<_> = nodes.iter().map(|node| node.addr().port()).collect();
        register(&nodes, &ports).await;
        Self {
            coordinator: nodes.remove(0),
            workers: nodes,
        }
    }

    /// Starts a cluster whose fence has its rows on the same workers as the rows of `inventory`.
    pub async fn with_distributed_fence() -> Self {
        let cluster = Self::with_fence().await;
        cluster.distribute().await;
        cluster
    }

    /// Distributes the fence together with `inventory`.
    pub async fn distribute(&self) {
        self.execute("SELECT tower_fence.distribute('inventory')")
            .await;
    }

    /// Creates the table `inventory`, with stock of the ten resources `sku-0` to `sku-9`.
    pub async fn make_inventory(&self) {
        self.execute(&format!(
            "CREATE TABLE inventory (sku text COLLATE \"C\" PRIMARY KEY, n bigint NOT NULL); \
             SELECT create_distributed_table('inventory', 'sku', shard_count => 8); \
             INSERT INTO inventory SELECT 'sku-' || number, {STOCK} FROM generate_series(0, 9) AS number"
        ))
        .await;
    }

    /// Connects to the coordinator.
    pub async fn connect(&self) -> PgConnection {
        self.coordinator.connect().await
    }

    pub async fn pool(&self, max_connections: u32) -> PgPool {
        let options: PgConnectOptions = self.coordinator.url("postgres").parse().unwrap();
        let pool = PgPoolOptions::new().max_connections(max_connections);
        pool.connect_with(options).await.unwrap()
    }

    pub async fn fence(&self) -> Fence<Postgres> {
        self.fence_with(|fence| fence).await
    }

    /// Returns a fence on the coordinator whose builder is configured by `set`.
    pub async fn fence_with(
        &self,
        set: impl FnOnce(FenceBuilder<Postgres>) -> FenceBuilder<Postgres>,
    ) -> Fence<Postgres> {
        set(Fence::builder()).build(self.pool(20).await)
    }

    pub async fn execute(&self, sql: &str) {
        self.try_execute(sql).await.unwrap();
    }

    /// Runs statements on the coordinator, each in its own transaction.
    pub async fn try_execute(&self, sql: &str) -> sqlx::Result<()> {
        let mut conn = self.connect().await;
        for statement in sql.split("; ") {
            Postgres::execute(&mut conn, statement).await?;
        }
        conn.close().await
    }

    /// Returns the index of the worker that has the shard of a resource.
    pub async fn worker_of(&self, resource: &str) -> usize {
        let port: i32 = self
            .read(&format!(
                "SELECT nodeport FROM citus_shards WHERE table_name = 'inventory'::regclass \
                 AND shardid = get_shard_id_for_distribution_column('inventory', '{resource}')"
            ))
            .await;
        let ports = self.workers.iter().map(|worker| worker.addr().port());
        ports
            .into_iter()
            .position(|one| i32::from(one) == port)
            .expect("no worker has the shard")
    }

    /// Moves the shard of a resource, and the shards that are colocated with it, to a worker.
    pub async fn try_move_shard(&self, resource: &str, worker: usize) -> sqlx::Result<()> {
        let from = self.workers[self.worker_of(resource).await].addr().port();
        let to = self.workers[worker].addr().port();
        self.try_execute(&format!(
            "SELECT citus_move_shard_placement(get_shard_id_for_distribution_column('inventory', '{resource}'), \
             '127.0.0.1', {from}, '127.0.0.1', {to}, 'force_logical')"
        ))
        .await
    }

    /// Like [`try_move_shard`](Self::try_move_shard), but repeats the move until Citus accepts it.
    pub async fn move_shard(&self, resource: &str, worker: usize) {
        eventually("the shard moves", async || {
            match self.try_move_shard(resource, worker).await {
                Ok(()) => true,
                Err(error) => {
                    let text = error.to_string();
                    // After a failover, Citus refuses moves until it has synchronized its metadata.
                    // If a move and a write wait for each other, Citus cancels one of them.
                    let passes = ["is out of sync", "deadlock"];
                    assert!(passes.iter().any(|part| text.contains(part)), "{text}");
                    false
                }
            }
        })
        .await;
    }

    /// Registers another address of a node, and waits until Citus delegates calls to it.
    pub async fn update_node(&self, old: SocketAddr, new: SocketAddr) {
        let (old, new) = (old.port(), new.port());
        self.execute(&format!(
            "SELECT citus_update_node(nodeid, '127.0.0.1', {new}) FROM pg_dist_node WHERE nodeport = {old}"
        ))
        .await;
        eventually("Citus synchronizes its metadata", async || {
            let out_of_sync = "SELECT count(*) FROM pg_dist_node WHERE NOT metadatasynced";
            self.read::<i64>(out_of_sync).await == 0
        })
        .await;
    }

    /// Crashes the coordinator, and replaces it with its promoted standby. Changes that were held
    /// back from the standby are lost.
    pub async fn fail_over_coordinator(&mut self, standby: Standby) {
        self.coordinator.crash().await;
        self.coordinator = standby.promote().await;
        let port = self.coordinator.addr().port();
        let set_host = format!("SELECT citus_set_coordinator_host('127.0.0.1', {port})");
        self.execute(&set_host).await;
    }

    pub async fn read<T>(&self, sql: &str) -> T
    where
        (T,): for<'r> sqlx::FromRow<'r, PgRow>,
        T: Send + Unpin,
    {
        let mut conn = self.connect().await;
        let value = read(&mut conn, sql).await;
        conn.close().await.unwrap();
        value
    }
}

/// Starts a node. A fence recognizes the nodes of a cluster by their system identifiers, so each of
/// them is of another kind.
async fn node(kind: usize) -> PostgresServer {
    let programs = PathBuf::from(variable("TEST_CITUS"));
    PostgresServer::start_from(programs, kind, &[("pg_hba.conf", ACCESS)], SETTINGS).await
}

/// Returns the nodes of a cluster with a fence and `inventory`, the coordinator first. They do not
/// run, and are deleted together with their last copy.
///
/// A cluster of copies starts in a third of the time.
async fn stopped_nodes() -> Vec<Arc<PostgresServer>> {
    static NODES: Mutex<Vec<Weak<PostgresServer>>> = Mutex::const_new(vec![]);
    let mut known = NODES.lock().await;
    let nodes: Vec<_> = known.iter().filter_map(Weak::upgrade).collect();
    if nodes.len() == 3 {
        return nodes;
    }
    let cluster = Cluster::start().await;
    cluster.fence().await.migrate().await.unwrap();
    cluster.make_inventory().await;
    let mut nodes = vec![cluster.coordinator];
    nodes.extend(cluster.workers);
    // No copy connects to another cluster before its own ports are registered.
    register(&nodes, &[1, 2, 3]).await;
    for node in &mut nodes {
        node.stop().await;
    }
    let nodes: Vec<_> = nodes.into_iter().map(Arc::new).collect();
    *known = nodes.iter().map(Arc::downgrade).collect();
    nodes
}

/// Registers the ports of the nodes with each node.
async fn register(nodes: &[PostgresServer], ports: &[u16]) {
    for node in nodes {
        let ports = format!("UPDATE pg_dist_node SET nodeport = (ARRAY{ports:?})[groupid + 1]");
        execute(node, &ports).await;
    }
}
