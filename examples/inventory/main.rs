//! An inventory service whose stock can be written only under a current lease.
//!
//! ```text
//! cargo run --example inventory
//! ```
//!
//! | variable | default |
//! |---|---|
//! | `LISTEN_ADDR` | `127.0.0.1:3000`; port 0 selects a free port |
//! | `DATABASE_URL` | SQLite in a temporary file; otherwise `postgres://…` or `sqlite:…` |
//! | `REDIS_URL` | unset: leases are stored in Postgres, or with SQLite in this process; otherwise `redis://…`, with `DATABASE_URL`, because the token counters in Redis belong to one database |
//! | `TOKEN_KEY` | unset: tokens are plain numbers. With `ID:SECRET` (`k1:` and the output of `openssl rand -hex 32`), tokens are signed and verified |
//! | `TOKEN_KEY_FILE` | unset; otherwise a file that contains `ID:SECRET` |
//! | `WAIT_LIMIT_MS` | `60000`, the longest time in milliseconds for which a request for a lease may wait in the queue |
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
    sync::watch,
};
use tower_fence::{
    Fence, FenceDatabase, TokenKeys,
    lease::{LeaseAdmin, MemoryLeases, PostgresLeases, RedisLeases},
};
use tower_fence_console::Events;
use tracing_subscriber::{EnvFilter, Layer, layer::SubscriberExt, util::SubscriberInitExt};

/// The timeout for requests in flight after a signal to stop.
const DRAIN_LIMIT: Duration = Duration::from_secs(25);

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let filter = match env::var(EnvFilter::DEFAULT_ENV) {
        Ok(filter) => EnvFilter::try_new(filter).map_err(|error| format!("RUST_LOG: {error}"))?,
        Err(_) => "info,sqlx=warn,redis=off".into(),
    };
    let events = Events::new();
    let log = tracing_subscriber::fmt::layer()
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal());
    tracing_subscriber::registry()
        .with(log.with_filter(filter))
        .with(events.layer())
        .init();

    // The bounds of the buckets of all histograms, in seconds.
    let buckets = [0.005, 0.025, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 60.0];
    let metrics = PrometheusBuilder::new()
        .set_buckets(&buckets)?
        .install_recorder()?;
    tower_fence::metrics::register();
    // Drain the histograms regularly, even if the metrics are not scraped.
    let upkeep = metrics.clone();
    tokio::spawn(async move {
        loop {
            tokio::time::sleep(Duration::from_secs(5)).await;
            upkeep.run_upkeep();
        }
    });

    let observers = Observers { metrics, events };
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
            run(listener, addr, fence, "Postgres", observers).await
        }
        Some(url) if url.starts_with("sqlite:") => {
            let fence = sqlite(url.parse()?).await?;
            let database = "SQLite from DATABASE_URL";
            run(listener, addr, fence, database, observers).await
        }
        Some(_) => Err("DATABASE_URL must begin with postgres:// or sqlite:".into()),
        None => {
            let folder = tempfile::tempdir()?;
            let file = folder.path().join("inventory.db");
            let fence = sqlite(SqliteConnectOptions::new().filename(&file)).await?;
            let database = format!("SQLite in {}", file.display());
            run(listener, addr, fence, &database, observers).await
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

/// The metrics of the service, and the events for the console.
struct Observers {
    metrics: PrometheusHandle,
    events: Events,
}

/// Builds the service, with the playground at `/` and the console at `/console`. The console is for
/// operators, so a real service must authenticate its users, as the documentation of
/// [`tower_fence_console`] shows.
fn routes<DB: Stock, L: LeaseAdmin + Clone>(
    fence: Fence<DB>,
    leases: L,
    keys: Option<TokenKeys>,
    events: Events,
    stopped: watch::Receiver<bool>,
) -> Result<Router, String> {
    let console = tower_fence_console::router(fence.clone(), leases.clone(), events);
    let playground = playground::router(fence.pool().clone());
    let app = app::router(fence, leases, keys, stopped)?;
    Ok(app.merge(playground).nest_service("/console", console))
}

/// A database of the service. If there is no Redis, the kind of the database determines the lease
/// store. Each grant is announced. A holder may therefore read with a plain GET after the grant,
/// and write a value that it has computed from the result.
trait Deployment: FenceDatabase {
    /// Builds the routes, and returns them with the name of the lease store.
    fn router(
        fence: Fence<Self>,
        keys: Option<TokenKeys>,
        events: Events,
        stopped: watch::Receiver<bool>,
    ) -> Result<(Router, &'static str), String>;
}

impl Deployment for sqlx::Postgres {
    fn router(
        fence: Fence<Self>,
        keys: Option<TokenKeys>,
        events: Events,
        stopped: watch::Receiver<bool>,
    ) -> Result<(Router, &'static str), String> {
        let leases = PostgresLeases::new(fence.clone());
        let app = routes(fence, leases, keys, events, stopped)?;
        Ok((app, "Postgres"))
    }
}

impl Deployment for sqlx::Sqlite {
    fn router(
        fence: Fence<Self>,
        keys: Option<TokenKeys>,
        events: Events,
        stopped: watch::Receiver<bool>,
    ) -> Result<(Router, &'static str), String> {
        let leases = MemoryLeases::new(fence.clone()).announced_to(fence.clone());
        let app = routes(fence, leases, keys, events, stopped)?;
        Ok((app, "in this process"))
    }
}

async fn run<DB: Stock + Deployment>(
    listener: TcpListener,
    addr: SocketAddr,
    fence: Fence<DB>,
    database: &str,
    Observers { metrics, events }: Observers,
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

    let (stopping, stopped) = watch::channel(false);
    let (app, leases) = match env::var("REDIS_URL") {
        Ok(url) => {
            let leases = RedisLeases::connect(&url, fence.clone()).await?;
            let leases = leases.announced_to(fence.clone());
            let app = routes(fence, leases, keys, events, stopped)?;
            (app, "Redis")
        }
        Err(_) => DB::router(fence, keys, events, stopped)?,
    };
    let app = app.route("/metrics", get(async move || metrics.render()));
    println!("inventory listens on http://{addr}");
    println!("  fence and stock: {database}");
    println!("  leases:          {leases}");
    println!("  tokens:          {tokens}");
    println!("{}", story(addr));
    serve(listener, app, stopping).await
}

/// Serves requests until SIGINT or SIGTERM. Then it sets `stopping` to true, and completes the
/// requests in flight.
async fn serve(
    listener: TcpListener,
    app: Router,
    stopping: watch::Sender<bool>,
) -> Result<(), Box<dyn Error>> {
    let (mut interrupt, mut terminate) = (
        signal(SignalKind::interrupt())?,
        signal(SignalKind::terminate())?,
    );
    let mut stopped = stopping.subscribe();
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
The playground is at http://{addr}, and the console for operators at http://{addr}/console. With curl:

  U=http://{addr}
  grant() {{ curl -s -D- -o /dev/null --json '{{"ttl_ms": 1000}}' $U/locks/sku-1 | grep -i '^fencing-token' | tr -d '\r'; }}

  curl -X PUT -H "$(grant)" --json '{{"stock": 10}}' $U/inventory/sku-1; sleep 1.1
  first=$(grant); sleep 1.1; second=$(grant)    # holder 1 pauses, and its lease expires
  curl -H "$second" --json '{{"quantity": 1}}' $U/inventory/sku-1/decrement; echo
  curl -H "$first"  --json '{{"quantity": 1}}' $U/inventory/sku-1/decrement; echo
"#
    )
}
