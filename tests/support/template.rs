//! A template database in Postgres with the tables of the fence. Each test gets a copy of it, which
//! takes a quarter of the time of the migrations.

use std::{
    fs,
    hash::{DefaultHasher, Hash, Hasher},
    time::Duration,
};

use sqlx::{AssertSqlSafe, Connection, Executor, PgConnection};
use tokio::sync::OnceCell;
use tower_fence::Fence;

use super::database::{TABLES, pool_of};

/// The advisory lock of the database `postgres` under which the template is created.
const LOCK: &str = "SELECT pg_advisory_lock(7208)";

/// Creates a copy of the template with this name.
pub async fn copy(server: &str, name: &str) {
    static TEMPLATE: OnceCell<String> = OnceCell::const_new();
    let template = TEMPLATE.get_or_init(|| make(server)).await;
    let create = format!("CREATE DATABASE {name} TEMPLATE {template}");
    on_all(server, &create).await;
}

/// Returns the URLs of the workers if the server is the coordinator of a Citus cluster. Each
/// database then exists on all nodes under the same name, and its fence is distributed.
pub fn workers() -> Vec<String> {
    let urls = std::env::var("TEST_CITUS_WORKERS").unwrap_or_default();
    urls.split_whitespace().map(str::to_owned).collect()
}

/// Runs a statement on the server, and on its workers.
async fn on_all(server: &str, sql: &str) {
    for url in [server.to_owned()].into_iter().chain(workers()) {
        let mut conn = PgConnection::connect(&url).await.unwrap();
        // The statement fails until the server has ended the sessions that were closed just before.
        let mut attempts = 0;
        while let Err(error) = conn.execute(AssertSqlSafe(sql.to_owned())).await {
            attempts += 1;
            assert!(attempts < 1_000, "{error}");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        conn.close().await.unwrap();
    }
}

fn database(server: &str, name: &str) -> reqwest::Url {
    let mut url = reqwest::Url::parse(server).unwrap();
    url.set_path(name);
    url
}

/// Joins the databases of this name to a cluster.
async fn join(server: &str, name: &str) {
    let at = |url: &str| {
        let url = reqwest::Url::parse(url).unwrap();
        format!("'127.0.0.1', {}", url.port().unwrap())
    };
    let mut nodes = vec![format!("SELECT citus_set_coordinator_host({})", at(server))];
    for worker in workers() {
        nodes.push(format!("SELECT citus_add_node({})", at(&worker)));
        extend(&worker, name, &[]).await;
    }
    extend(server, name, &nodes).await;
}

/// Creates the extension in a database of a node, and runs statements in that database.
async fn extend(server: &str, name: &str, statements: &[String]) {
    let url = database(server, name);
    let mut conn = PgConnection::connect(url.as_str()).await.unwrap();
    conn.execute("CREATE EXTENSION citus").await.unwrap();
    for statement in statements {
        let statement = AssertSqlSafe(statement.clone());
        conn.execute(statement).await.unwrap();
    }
    conn.close().await.unwrap();
}

/// Creates the template if it is missing. Returns its name, which contains a hash of the
/// migrations, and the options for a copy of it.
async fn make(server: &str) -> String {
    let name = format!("tower_fence_template_{:016x}", migrations());
    let mut conn = PgConnection::connect(server).await.unwrap();
    conn.execute(LOCK).await.unwrap();
    let is_there = sqlx::query_scalar("SELECT EXISTS (SELECT FROM pg_database WHERE datname = $1)");
    let is_there: bool = is_there.bind(&name).fetch_one(&mut conn).await.unwrap();
    if !is_there {
        // The template gets its name only when it is complete.
        let unfinished = format!("{name}_unfinished");
        for sql in ["DROP DATABASE IF EXISTS", "CREATE DATABASE"] {
            on_all(server, &format!("{sql} {unfinished}")).await;
        }
        let is_cluster = !workers().is_empty();
        if is_cluster {
            join(server, &unfinished).await;
        }
        let url = database(server, &unfinished);
        let pool = pool_of(url.as_str(), 2).await;
        Fence::new(pool.clone()).migrate().await.unwrap();
        pool.execute(TABLES).await.unwrap();
        if is_cluster {
            let distribute = "SELECT tower_fence.distribute()";
            pool.execute(distribute).await.unwrap();
        }
        pool.close().await;
        if is_cluster {
            // Citus keeps a session open in each database, which would prevent the copies.
            let close = format!("ALTER DATABASE {unfinished} ALLOW_CONNECTIONS false");
            on_all(server, &close).await;
            let end = format!(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{unfinished}'"
            );
            on_all(server, &end).await;
        }
        // The server ends the sessions a moment after the pool was closed.
        let sessions = "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE datname = $1)";
        for attempt in 0.. {
            let query = sqlx::query_scalar(sessions).bind(&unfinished);
            let is_in_use: bool = query.fetch_one(&mut conn).await.unwrap();
            if !is_in_use {
                break;
            }
            assert!(attempt < 1_000, "sessions of the template do not end");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        let rename = format!("ALTER DATABASE {unfinished} RENAME TO {name}");
        on_all(server, &rename).await;
    }
    // Without this option, Postgres 15 and later write the copy to the log, which takes longer.
    let copies_files = conn.server_version_num() >= Some(15_00_00);
    conn.close().await.unwrap();
    match copies_files {
        true => format!("{name} STRATEGY file_copy"),
        false => name,
    }
}

fn migrations() -> u64 {
    let folder = super::repository().join("migrations/postgres");
    let mut files: Vec<_> = fs::read_dir(folder).unwrap().flatten().collect();
    files.sort_by_key(fs::DirEntry::file_name);
    let mut hasher = DefaultHasher::new();
    (TABLES, workers()).hash(&mut hasher);
    for file in files {
        fs::read(file.path()).unwrap().hash(&mut hasher);
    }
    hasher.finish()
}
