//! The cost of a fenced write, compared with an unfenced one. See `benches/README.md`.

mod apps;
mod client;
mod functions;
mod round_trips;
mod scripts;

use axum::Router;
use sqlx::{
    PgPool,
    postgres::{PgConnectOptions, PgPoolOptions},
};
use tokio::runtime::Runtime;
use tower_fence::{Fence, Resource, Token, TokenUse};

use tower_fence_benches as support;

use self::{
    apps::{App, Carries, HIGHEST, TOKENS, apps},
    client::Writer,
    scripts::{ONE_STATEMENT, SCRIPTS, pgbench},
    support::{
        http, latency, load, machine,
        options::Options,
        postgres::PostgresServer,
        report::{Report, file_name},
        rounds::{self, Contender, Outcome},
    },
};

const DATABASE: &str = "postgres";
const RESOURCES: usize = 1_000;

/// Initial stock of each resource.
const STOCK: i64 = 1_000_000_000;

/// The baseline: a write in a transaction, without a fence.
const BASELINE: &str = "transaction";

fn main() {
    let options = Options::read();
    let runtime = http::runtime();
    let server = runtime.block_on(PostgresServer::start(&["max_wal_size=4GB"]));
    let mut report = Report::new("writes", &options, machine::describe(&server.programs));
    let pool = PgPoolOptions::new()
        .max_connections(16)
        .min_connections(16)
        .test_before_acquire(options.test_connections);
    let mut url: PgConnectOptions = server.url(DATABASE).parse().expect("a URL");
    if !options.latency.is_zero() {
        url = url.port(latency::in_front_of(server.addr(), options.latency).port());
    }
    let pool = runtime.block_on(pool.connect_with(url));
    let pool = pool.expect("postgres answers");
    let fence = Fence::new(pool.clone());
    let bench = Bench {
        apps: apps(&pool, &fence),
        runtime,
        server,
        pool,
        options,
    };
    bench.runtime.block_on(bench.prepare(&fence));
    let addr = http::serve(&bench.runtime, router(&bench.apps));
    round_trips::count(&bench, &mut report);
    for (connections, title) in [
        (1, "1 connection, 1,000 resources"),
        (16, "16 connections, 1,000 resources"),
        (64, "64 connections, 1,000 resources"),
    ] {
        bench.race(&mut report, title, addr, connections, false);
    }
    bench.race(&mut report, "16 connections, 1 resource", addr, 16, true);
    if bench.options.latency.is_zero() {
        functions::race_all(&bench, &mut report);
    }
    report.finish();
}

/// Returns one router for all contenders.
fn router(apps: &[App]) -> Router {
    apps.iter().fold(Router::new(), |whole, app| {
        whole.nest(&path(app), app.router.clone())
    })
}

fn path(app: &App) -> String {
    format!("/{}", file_name(app.name))
}

struct Bench {
    apps: Vec<App>,
    runtime: Runtime,
    server: PostgresServer,
    pool: PgPool,
    options: Options,
}

impl Bench {
    /// Returns the resources of a contender. No other contender writes to them.
    fn skus(name: &str, hot: bool) -> Vec<String> {
        let resources = if hot { 1 } else { RESOURCES };
        let prefix = file_name(name);
        (0..resources).map(|n| format!("{prefix}-{n}")).collect()
    }

    async fn prepare(&self, fence: &Fence<sqlx::Postgres>) {
        fence.migrate().await.expect("the fence's tables");
        // Only the contender `version column` uses the column.
        let table = "CREATE TABLE stock (sku TEXT PRIMARY KEY, n BIGINT NOT NULL, \
                     version BIGINT NOT NULL DEFAULT 0) WITH (fillfactor = 70)";
        for table in [table, TOKENS] {
            sqlx::raw_sql(table).execute(&self.pool).await.expect("DDL");
        }
        let names = self.apps.iter().map(|app| app.name);
        for name in names.chain(SCRIPTS.map(|(name, ..)| name)) {
            sqlx::query("INSERT INTO stock SELECT sku, $2 FROM unnest($1) sku")
                .bind(Self::skus(name, false))
                .bind(STOCK)
                .execute(&self.pool)
                .await
                .expect("a row for each resource");
        }
        let used = self.apps.iter().map(|app| (app.name, app.carries));
        for (name, carries) in used.chain([(ONE_STATEMENT, Carries::NewToken)]) {
            let token = match carries {
                Carries::Nothing | Carries::ForgedToken => continue,
                // After a write under this token, every other token of the bench is stale.
                Carries::StaleToken => HIGHEST,
                // Writes once to each resource, so that its row exists before the measurement.
                _ => client::next_token(),
            };
            let token = Token::new(token).expect("a token");
            for sku in Self::skus(name, false) {
                let resource = Resource::new(sku).expect("a name");
                let tx = fence.begin(&resource, token, TokenUse::SingleUse).await;
                let committed = tx.expect("it is new").commit().await;
                committed.expect("postgres answers");
            }
        }
        for statement in ["VACUUM ANALYZE", "CHECKPOINT"] {
            let done = sqlx::raw_sql(statement).execute(&self.pool).await;
            done.expect(statement);
        }
    }

    fn race(
        &self,
        report: &mut Report,
        title: &str,
        addr: std::net::SocketAddr,
        connections: usize,
        hot: bool,
    ) {
        if !self.options.wants(title) {
            return;
        }
        let before = self.decrements();
        let mut contenders = vec![];
        for app in &self.apps {
            let carries = if hot { app.when_hot } else { Some(app.carries) };
            let Some(carries) = carries else { continue };
            let skus = Self::skus(app.name, hot);
            let writers = Writer::all(&path(app), carries, &skus, connections);
            let mut writers = Some(writers);
            contenders.push(Contender::new(app.name, move |window| {
                let taken = writers.take().expect("they were given back");
                let (sample, given_back) = load::drive(addr, taken, window);
                writers = Some(given_back);
                sample
            }));
        }
        for (name, statements, when_hot) in SCRIPTS {
            // pgbench bypasses the proxy that adds the latency.
            if hot && !when_hot || !self.options.latency.is_zero() {
                continue;
            }
            let prefix = file_name(name);
            let resources = if hot { 1 } else { RESOURCES };
            let pgbench = pgbench(&self.server, statements, &prefix, resources, connections);
            contenders.push(Contender::new(name, move |window| pgbench.run(window)));
        }
        let outcomes = rounds::run(title, BASELINE, contenders, &self.options);
        self.check(&before, &outcomes);
        report.contenders(title, BASELINE, &outcomes);
    }

    /// Returns the number of decrements of each contender.
    fn decrements(&self) -> Vec<(String, i64)> {
        let sums = sqlx::query_as(
            "SELECT regexp_replace(sku, '-\\d+$', ''), CAST(sum($1 - n) AS BIGINT) \
             FROM stock GROUP BY 1",
        );
        let sums = sums.bind(STOCK).fetch_all(&self.pool);
        self.runtime.block_on(sums).expect("the sums")
    }

    /// Checks that there is exactly one decrement for each success.
    fn check(&self, before: &[(String, i64)], outcomes: &[Outcome]) {
        let after = self.decrements();
        let of = |sums: &[(String, i64)], name: &str| {
            let sum = sums.iter().find(|(prefix, _)| *prefix == file_name(name));
            sum.expect("each contender has resources").1
        };
        for outcome in outcomes {
            let name = outcome.name.as_str();
            let decrements = of(&after, name) - of(before, name);
            let expected = match name {
                "no-op" | "refusal by hand" | "stale" | "forged" => 0,
                _ => i64::try_from(outcome.done()).expect("not so many"),
            };
            assert_eq!(
                decrements, expected,
                "{name}: the data differs from the answers"
            );
        }
    }
}
