//! The routes `/healthz`, which reports that the process runs, and `/readyz`, which reports whether
//! the stores would accept a grant, as far as their checks and the latest grants show.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use axum::{Json, extract::State, response::IntoResponse};
use http::{HeaderValue, StatusCode, header::CACHE_CONTROL};
use serde_json::{Map, Value, json};
use tokio::{
    sync::{Mutex, OwnedMutexGuard},
    time::sleep,
};

use super::{
    probe::{Probe, Reason},
    recent_grants::RecentGrants,
    stop::Stop,
};
use crate::failure::{Failure, UNAVAILABLE};

/// How long a result is cached, so that the stores are checked at most once a second.
const FRESH: Duration = Duration::from_secs(1);

/// The interval of the server's own checks until it is ready for the first time.
const AT_START: Duration = Duration::from_secs(5);

/// The health of the stores.
pub struct Health {
    database: Probe,
    leases: Probe,
    grants: Arc<RecentGrants>,
    found: Arc<Mutex<Option<(Instant, Found)>>>,
    stop: Stop,
}

/// The problem of each store; `None` if the store would accept a grant.
#[derive(Clone)]
struct Found {
    database: Option<String>,
    leases: Option<String>,
}

impl Health {
    pub fn new(database: Probe, leases: Probe, stop: Stop) -> Self {
        Self {
            database,
            leases,
            grants: Arc::default(),
            found: Arc::default(),
            stop,
        }
    }

    /// Returns the check of each store, with the name of the store.
    pub fn into_probes(self) -> [(&'static str, Probe); 2] {
        [("database", self.database), ("lease store", self.leases)]
    }

    /// Returns the record of the outcomes of grants.
    pub fn grants(&self) -> Arc<RecentGrants> {
        Arc::clone(&self.grants)
    }

    /// Checks the stores repeatedly until they would accept a grant, and logs their problems.
    pub async fn check_until_ready(self: &Arc<Self>) {
        while !self.find().await.is_ready() {
            sleep(AT_START).await;
        }
    }

    /// Checks both stores, unless a recent result is cached. A check is completed even if its
    /// client disconnects.
    async fn find(self: &Arc<Self>) -> Found {
        let last = Arc::clone(&self.found).lock_owned().await;
        if let Some((at, found)) = &*last
            && at.elapsed() < FRESH
        {
            return found.clone();
        }
        let health = Arc::clone(self);
        let check = tokio::spawn(async move { health.check(last).await });
        check.await.unwrap_or_else(|error| {
            let broken = Some(error.to_string());
            Found {
                database: broken.clone(),
                leases: broken,
            }
        })
    }

    /// Checks both stores, and caches the result.
    async fn check(&self, mut last: OwnedMutexGuard<Option<(Instant, Found)>>) -> Found {
        let leases = async {
            self.leases.check().await?;
            self.grants.outcome()
        };
        let (database, leases) = tokio::join!(
            wrong("database", self.database.check()),
            wrong("lease store", leases)
        );
        let found = Found { database, leases };
        let was_ready = last.as_ref().is_some_and(|(_, last)| last.is_ready());
        if found.is_ready() && !was_ready {
            tracing::info!("ready");
        }
        *last = Some((Instant::now(), found.clone()));
        found
    }
}

impl Found {
    const fn is_ready(&self) -> bool {
        self.database.is_none() && self.leases.is_none()
    }
}

/// Returns the problem of a store for the body of the answer, and logs the complete error.
async fn wrong(store: &str, check: impl Future<Output = Result<(), Reason>>) -> Option<String> {
    let reason = check.await.err()?;
    let error = Failure::new(UNAVAILABLE, reason.complete).for_people();
    tracing::warn!(store, error, "not ready: a store would not accept a grant");
    Some(reason.shown)
}

pub async fn alive() -> impl IntoResponse {
    no_store(StatusCode::OK, json!({"status": "alive"}))
}

pub async fn ready(State(health): State<Arc<Health>>) -> impl IntoResponse {
    let unavailable = StatusCode::SERVICE_UNAVAILABLE;
    if health.stop.has_begun() {
        return no_store(unavailable, json!({"status": "stopping"}));
    }
    let found = health.find().await;
    let (code, status) = match found.is_ready() {
        true => (StatusCode::OK, "ready"),
        false => (unavailable, "unavailable"),
    };
    let mut body = json!({"status": status});
    let mut reasons = Map::new();
    for (store, reason) in [("database", found.database), ("leases", found.leases)] {
        body[store] = if reason.is_none() {
            "ok"
        } else {
            "unavailable"
        }
        .into();
        if let Some(reason) = reason {
            reasons.insert(store.into(), reason.into());
        }
    }
    if !reasons.is_empty() {
        body["reasons"] = Value::Object(reasons);
    }
    no_store(code, body)
}

fn no_store(status: StatusCode, body: Value) -> impl IntoResponse {
    let header = (CACHE_CONTROL, HeaderValue::from_static("no-store"));
    (status, [header], Json(body))
}
