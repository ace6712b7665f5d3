//! An inventory service whose stock can only be written under a current lease.
//!
//! ```text
//! cargo run --example inventory
//! ```
//!
//! | variable | default |
//! |---|---|
//! | `LISTEN_ADDR` | `127.0.0.1:3000`; port 0 takes a free one |
//! | `DATABASE_URL` | SQLite in a temporary file; `postgres://…` or `sqlite:…` |
//! | `REDIS_URL` | leases in the database, or, with SQLite, in this process; `redis://…` |
//! | `TOKEN_KEY` | tokens are plain numbers; with `ID:SECRET` (`k1:` and `openssl rand -hex 32`) signed and verified |
//! | `TOKEN_KEY_FILE` | a file with the same |
//! | `WAIT_LIMIT_MS` | `60000`: how long a request for a lease may wait in the queue |
//! | `RUST_LOG` | `info` |

mod api;
mod app;
mod playground;
mod stock;

use std::{env, error::Error, io::IsTerminal, net::SocketAddr, time::Duration};

use axum::{Router, routing::get};
use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle};
use sqlx::{
    postgres::PgPoolOptions,
    sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions},
};
use stock::Stock;
use tokio::{
    net::TcpListener,
    signal::unix::{SignalKind, signal},
};
use tower_fence::{
    Fence, FenceDatabase, TokenKeys, console,
    lease::{LeaseAdmin, MemoryLeases, PostgresLeases, RedisLeases},
};
use tracing_subscriber::EnvFilter;

/// How long requests in flight may take after a signal to stop.
const DRAIN_LIMIT: Duration = Duration::from_secs(25);

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| "info,sqlx=warn".into());
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .init();

    let metrics = PrometheusBuilder::new().install_recorder()?;
    // Drain the histograms regularly, even if the metrics are not scraped.
    let upkeep = metrics.clone();
    tokio::spawn(async move {
        loop {
            tokio::time::sleep(Duration::from_secs(5)).await;
            upkeep.run_upkeep();
        }
    });

    let listen_addr = env::var("LISTEN_ADDR").unwrap_or_else(|_| "127.0.0.1:3000".into());
    let listener = TcpListener::bind(&listen_addr)
        .await
        .map_err(|error| format!("cannot listen on LISTEN_ADDR={listen_addr}: {error}"))?;
    let addr = listener.local_addr()?;

    match env::var("DATABASE_URL").ok() {
        Some(url) if url.starts_with("postgres://") || url.starts_with("postgresql://") => {
            let pool = PgPoolOptions::new()
                .max_connections(16)
                .acquire_timeout(Duration::from_secs(5));
            let fence = Fence::builder().connect_with(pool, url.parse()?).await?;
            run(listener, addr, fence, "Postgres", metrics).await
        }
        Some(url) if url.starts_with("sqlite:") => {
            let fence = sqlite(url.parse()?).await?;
            let database = "SQLite from DATABASE_URL";
            run(listener, addr, fence, database, metrics).await
        }
        Some(_) => Err("DATABASE_URL must begin with postgres:// or sqlite:".into()),
        None => {
            let folder = tempfile::tempdir()?;
            let file = folder.path().join("inventory.db");
            let fence = sqlite(SqliteConnectOptions::new().filename(&file)).await?;
            let database = format!("SQLite in {}", file.display());
            run(listener, addr, fence, &database, metrics).await
        }
    }
}

async fn sqlite(options: SqliteConnectOptions) -> sqlx::Result<Fence<sqlx::Sqlite>> {
    let options = options
        .create_if_missing(true)
        .journal_mode(SqliteJournalMode::Wal);
    Fence::builder()
        .connect_with(SqlitePoolOptions::new().max_connections(8), options)
        .await
}

/// Builds the service, with the playground at `/` and the console at `/console`. The console is for
/// operators. A real service puts authentication in front of it, as the documentation of
/// [`console`] shows.
fn routes<DB: Stock, L: LeaseAdmin + Clone>(
    fence: Fence<DB>,
    leases: L,
    keys: Option<TokenKeys>,
) -> Router {
    let console = console::router(fence.clone(), leases.clone());
    let playground = playground::router(fence.pool().clone());
    app::router(fence, leases, keys)
        .merge(playground)
        .nest_service("/console", console)
}

/// A database that also stores the leases if there is no Redis. Each grant is announced, so a plain
/// GET under a fresh lease is a safe basis for a write.
trait LeaseDatabase: FenceDatabase {
    /// Builds the routes, and names the place of the leases.
    fn router(fence: Fence<Self>, keys: Option<TokenKeys>) -> (Router, &'static str);
}

impl LeaseDatabase for sqlx::Postgres {
    fn router(fence: Fence<Self>, keys: Option<TokenKeys>) -> (Router, &'static str) {
        let leases = PostgresLeases::new(fence.clone());
        (routes(fence, leases, keys), "Postgres")
    }
}

impl LeaseDatabase for sqlx::Sqlite {
    fn router(fence: Fence<Self>, keys: Option<TokenKeys>) -> (Router, &'static str) {
        let leases = MemoryLeases::new(fence.clone()).announced_to(fence.clone());
        (routes(fence, leases, keys), "in this process")
    }
}

async fn run<DB: Stock + LeaseDatabase>(
    listener: TcpListener,
    addr: SocketAddr,
    fence: Fence<DB>,
    database: &str,
    metrics: PrometheusHandle,
) -> Result<(), Box<dyn Error>> {
    let keys = TokenKeys::from_env("TOKEN_KEY");
    let keys = keys.map_err(|error| format!("TOKEN_KEY or TOKEN_KEY_FILE: {error}"))?;
    let tokens = match &keys {
        Some(_) => "signed and verified with TOKEN_KEY",
        None => "plain numbers, which can be forged; set TOKEN_KEY to sign them",
    };
    let pool = fence.pool().clone();
    fence.migrate().await?;
    let maintained = fence.clone();
    tokio::spawn(async move { maintained.maintain(Duration::from_secs(60 * 60)).await });
    DB::create_table(&mut *pool.acquire().await?).await?;

    let (app, leases) = match env::var("REDIS_URL") {
        Ok(url) => {
            let leases = RedisLeases::connect(&url, fence.clone()).await?;
            let leases = leases.announced_to(fence.clone());
            (routes(fence, leases, keys), "Redis")
        }
        Err(_) => DB::router(fence, keys),
    };
    let app = app.route("/metrics", get(async move || metrics.render()));
    println!("inventory listens on http://{addr}");
    println!("  fence and stock: {database}");
    println!("  leases:          {leases}");
    println!("  tokens:          {tokens}");
    println!("{}", story(addr));
    serve(listener, app).await?;
    pool.close().await;
    Ok(())
}

/// Serves until SIGINT or SIGTERM, then lets the requests in flight finish.
async fn serve(listener: TcpListener, app: Router) -> Result<(), Box<dyn Error>> {
    let (mut interrupt, mut terminate) = (
        signal(SignalKind::interrupt())?,
        signal(SignalKind::terminate())?,
    );
    let (stopping, mut stopped) = tokio::sync::watch::channel(false);
    let server = axum::serve(listener, app).with_graceful_shutdown(async move {
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
        tracing::info!("stopping after the requests in flight");
        stopping.send_replace(true);
        // A second signal exits immediately.
        tokio::spawn(async move {
            tokio::select! {
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
            }
            std::process::exit(1);
        });
    });
    let drain_limit = async {
        let _ = stopped.wait_for(|stopped| *stopped).await;
        tokio::time::sleep(DRAIN_LIMIT).await;
    };
    tokio::select! {
        served = server => served?,
        () = drain_limit => tracing::warn!("some requests did not finish in time"),
    }
    Ok(())
}

fn story(addr: SocketAddr) -> String {
    format!(
        r#"
Watch a stale writer bounce in the browser, at http://{addr}, and as an operator, at http://{addr}/console. Or:

  U=http://{addr}
  grant() {{ curl -s -D- -o /dev/null --json '{{"ttl_ms": 1000}}' $U/locks/sku-1 | grep -i '^fencing-token' | tr -d '\r'; }}

  curl -X PUT -H "$(grant)" --json '{{"stock": 10}}' $U/inventory/sku-1; sleep 1.1
  first=$(grant); sleep 1.1; second=$(grant)    # the first holder pauses, its lease runs out
  curl -H "$second" --json '{{"quantity": 1}}' $U/inventory/sku-1/decrement; echo
  curl -H "$first"  --json '{{"quantity": 1}}' $U/inventory/sku-1/decrement; echo
"#
    )
}
