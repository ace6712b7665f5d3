//! A template database in Postgres with the tables of the fence. Each test gets a copy of it, which
//! takes a quarter of the time of the migrations.

use std::{
    fs,
    hash::{DefaultHasher, Hash, Hasher},
    time::Duration,
};

use sqlx::{AssertSqlSafe, Connection, Executor, PgConnection, postgres::PgPoolOptions};
use tokio::sync::OnceCell;
use tower_fence::Fence;

use super::database::TABLES;

/// The advisory lock of the database `postgres` under which the template is created.
const LOCK: &str = "SELECT pg_advisory_lock(7208)";

/// Creates a copy of the template with this name.
pub async fn copy(server: &str, name: &str) {
    static TEMPLATE: OnceCell<String> = OnceCell::const_new();
    let template = TEMPLATE.get_or_init(|| make(server)).await;
    let mut conn = PgConnection::connect(server).await.unwrap();
    let create = format!("CREATE DATABASE {name} TEMPLATE {template}");
    conn.execute(AssertSqlSafe(create)).await.unwrap();
}

/// Creates the template if it is missing, and returns its name. The name contains a hash of the
/// migrations.
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
            let sql = format!("{sql} {unfinished}");
            conn.execute(AssertSqlSafe(sql)).await.unwrap();
        }
        let mut url = reqwest::Url::parse(server).unwrap();
        url.set_path(&unfinished);
        let pool = PgPoolOptions::new().max_connections(2);
        let pool = pool.connect(url.as_str()).await.unwrap();
        Fence::new(pool.clone()).migrate().await.unwrap();
        pool.execute(TABLES).await.unwrap();
        pool.close().await;
        let rename = format!("ALTER DATABASE {unfinished} RENAME TO {name}");
        // The server ends the sessions of the pool a moment after the pool was closed.
        let mut attempts = 0;
        while let Err(error) = conn.execute(AssertSqlSafe(rename.clone())).await {
            attempts += 1;
            assert!(attempts < 1_000, "{error}");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
    conn.close().await.unwrap();
    name
}

fn migrations() -> u64 {
    let folder = super::repository().join("migrations/postgres");
    let mut files: Vec<_> = fs::read_dir(folder).unwrap().flatten().collect();
    files.sort_by_key(fs::DirEntry::file_name);
    let mut hasher = DefaultHasher::new();
    TABLES.hash(&mut hasher);
    for file in files {
        fs::read(file.path()).unwrap().hash(&mut hasher);
    }
    hasher.finish()
}
