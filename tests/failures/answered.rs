//! Holders that acquire leases in Postgres and write under them. Afterwards, the answers that they
//! received are compared with the database.

use std::{
    collections::{HashMap, HashSet},
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};

use axum::{Router, extract::Path, routing::post};
use futures_util::future::{join, join_all};
use sqlx::{PgPool, postgres::PgPoolOptions};
use tokio::time::{sleep, timeout};
use tower_fence::{
    AdmitError, Fence, FenceLayer, PathParam, PgFencedTx, Resource, Token, TokenUse,
    layer::DatabaseError,
    lease::{Acquire, Leases, PostgresLeases, Renew},
};

use crate::support::{
    eventually, fence::token, http::Server, postgres::PostgresServer, standby::execute,
};

const RESOURCES: usize = 4;
const HOLDERS: usize = 8;
const TTL: Duration = Duration::from_millis(500);

/// A server with the tables that the holders write to.
pub async fn server() -> PostgresServer {
    let server = PostgresServer::start(&[]).await;
    execute(&server, "CREATE TABLE written (sku TEXT, entry BIGINT)").await;
    fence(&server).await.migrate().await.unwrap();
    server
}

pub async fn fence(server: &PostgresServer) -> Fence<sqlx::Postgres> {
    Fence::new(PgPool::connect(&server.url("postgres")).await.unwrap())
}

fn resource(number: usize) -> Resource {
    Resource::new(format!("sku-{number}")).unwrap()
}

/// An acknowledged write.
pub struct Write {
    pub resource: Resource,
    pub token: i64,
    pub entry: i64,
}

/// Holders that run until they are stopped, and the answers that they received.
pub struct Holders {
    service: Server,
    pub leases: PostgresLeases,
    stop: AtomicBool,
    /// The highest granted token of each resource.
    granted: [Mutex<i64>; RESOURCES],
    pub acknowledged: Mutex<Vec<Write>>,
    /// The entries of the writes that were acknowledged, or whose outcome was reported as unknown.
    possible: Mutex<HashSet<i64>>,
    /// The number of grants and renewals whose token was not above all tokens that were returned
    /// before the request.
    repeated: AtomicUsize,
}

/// The comparison of the answers with the database.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// The number of acknowledged writes that are missing.
    pub lost: usize,
    /// The number of writes that were applied twice.
    pub doubled: usize,
    /// The number of writes that were applied, although every answer denied it.
    pub denied: usize,
    /// The number of acknowledged writes whose tokens are admitted again.
    pub forgotten: usize,
    /// The number of grants and renewals whose token was not above all tokens that were returned
    /// before the request.
    pub repeated: usize,
}

impl Outcome {
    #[track_caller]
    pub fn has_lost_enough(&self) -> &Self {
        // Fewer lost writes would prove nothing.
        assert!(self.lost > 50, "{self:?}");
        self
    }

    /// Checks that writes were lost, but nothing else.
    #[track_caller]
    pub fn has_lost_only_writes(&self) {
        self.has_lost_enough();
        let others = [self.doubled, self.denied, self.forgotten, self.repeated];
        assert_eq!(others, [0; 4], "{self:?}");
    }
}

async fn write(
    mut tx: PgFencedTx,
    Path((sku, entry)): Path<(String, i64)>,
) -> Result<(), DatabaseError> {
    let insert = sqlx::query("INSERT INTO written VALUES ($1, $2)");
    insert.bind(sku).bind(entry).execute(&mut *tx).await?;
    Ok(())
}

/// Runs holders against the server at `url` during `events`. Compares the answers that the holders
/// received with the server that `events` returns.
pub async fn outcome(url: &str, events: impl AsyncFnOnce(&Holders) -> PostgresServer) -> Outcome {
    let holders = Holders::on(url).await;
    let events = async {
        holders.go_on().await;
        let server = events(&holders).await;
        holders.go_on().await;
        holders.stop.store(true, Relaxed);
        server
    };
    let at_work = join_all((0..HOLDERS).map(|holder| holders.hold_and_write(holder)));
    let in_time = timeout(Duration::from_secs(60), join(events, at_work)).await;
    let (server, _) = in_time.expect("the holders do not continue");
    holders.judge(&server).await
}

impl Holders {
    async fn on(url: &str) -> Self {
        let pool = PgPoolOptions::new().max_connections(6);
        let pool = pool.acquire_timeout(Duration::from_secs(2));
        let fence = Fence::new(pool.connect(url).await.unwrap());
        let app = Router::new()
            .route("/{sku}/{entry}", post(write))
            .route_layer(FenceLayer::new(fence.clone(), PathParam("sku")));
        Self {
            service: Server::start(app).await,
            leases: PostgresLeases::new(fence),
            stop: AtomicBool::new(false),
            granted: Default::default(),
            acknowledged: Mutex::default(),
            possible: Mutex::default(),
            repeated: AtomicUsize::new(0),
        }
    }

    /// Waits for enough further acknowledged writes to make a loss visible.
    pub async fn go_on(&self) {
        let acknowledged = || self.acknowledged.lock().unwrap().len();
        let before = acknowledged();
        eventually!("writes continue", acknowledged() > before + 100);
    }

    async fn hold_and_write(&self, holder: usize) {
        for turn in holder.. {
            if self.stop.load(Relaxed) {
                return;
            }
            let number = turn % RESOURCES;
            let resource = resource(number);
            let before = self.highest(number);
            let Ok(lease) = self.leases.acquire(&resource, Acquire::new(TTL)).await else {
                sleep(Duration::from_millis(5)).await;
                continue;
            };
            self.record(number, before, lease.token);
            self.write(&resource, lease.token.get()).await;
            let before = self.highest(number);
            let renew = Renew::new(TTL).with_new_token();
            if let Ok(renewed) = self.leases.renew(&resource, &lease.id, renew).await {
                self.record(number, before, renewed.token);
            }
            let _ = self.leases.release(&resource, &lease.id).await;
        }
    }

    /// Returns the highest token that was returned for a resource so far.
    fn highest(&self, resource: usize) -> i64 {
        *self.granted[resource].lock().unwrap()
    }

    /// Records a returned token. `before` is the highest token that was returned before the
    /// request.
    fn record(&self, resource: usize, before: i64, token: Token) {
        let token = token.get();
        let is_repeated = usize::from(token <= before);
        self.repeated.fetch_add(is_repeated, Relaxed);
        let mut highest = self.granted[resource].lock().unwrap();
        *highest = token.max(*highest);
    }

    /// Repeats one write until its answer is final.
    async fn write(&self, resource: &Resource, token: i64) {
        let entry = rand::random_range(0..i64::MAX);
        loop {
            match self.try_write(resource, token, entry).await {
                200 => {
                    return self.acknowledged.lock().unwrap().push(Write {
                        resource: resource.clone(),
                        token,
                        entry,
                    });
                }
                // An attempt whose answer was lost has written, or a higher token has superseded
                // this one.
                412 => return,
                503 if self.stop.load(Relaxed) => return,
                503 => sleep(Duration::from_millis(5)).await,
                status => panic!("{status}"),
            }
        }
    }

    /// Returns the status of the answer.
    pub async fn try_write(&self, resource: &Resource, token: i64, entry: i64) -> u16 {
        let path = format!("/{resource}/{entry}");
        let answer = self.service.write(&path, token).await;
        if answer.status == 200 || answer.text.contains("outcome-unknown") {
            self.possible.lock().unwrap().insert(entry);
        }
        answer.status
    }

    async fn judge(&self, server: &PostgresServer) -> Outcome {
        let fence = fence(server).await;
        let entries = entries(fence.pool()).await;
        let acknowledged = std::mem::take(&mut *self.acknowledged.lock().unwrap());
        let possible = std::mem::take(&mut *self.possible.lock().unwrap());
        let lost = |write: &&Write| !entries.contains_key(&write.entry);
        let denied = |entry: &&i64| !possible.contains(*entry);
        let mut outcome = Outcome {
            lost: acknowledged.iter().filter(lost).count(),
            doubled: entries.values().filter(|&&times| times > 1).count(),
            denied: entries.keys().filter(denied).count(),
            forgotten: 0,
            repeated: self.repeated.load(Relaxed),
        };
        for write in &acknowledged {
            let again = fence.begin(&write.resource, token(write.token), TokenUse::SingleUse);
            match again.await {
                Err(AdmitError::Stale(_)) => {}
                Err(error) => panic!("{error:?}"),
                Ok(_) => outcome.forgotten += 1,
            }
        }
        println!("{} acknowledged: {outcome:?}", acknowledged.len());
        outcome
    }
}

/// Returns how often each entry was written.
pub async fn entries(pool: &PgPool) -> HashMap<i64, i64> {
    let entries = sqlx::query_as("SELECT entry, count(*) FROM written GROUP BY entry");
    let entries: Vec<(i64, i64)> = entries.fetch_all(pool).await.unwrap();
    entries.into_iter().collect()
}
