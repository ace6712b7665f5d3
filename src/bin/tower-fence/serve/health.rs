//! `/healthz`: the process lives. `/readyz`: its stores answer.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use axum::{Json, extract::State, response::IntoResponse};
use futures_util::future::BoxFuture;
use http::{HeaderValue, StatusCode, header::CACHE_CONTROL};
use serde_json::json;
use sqlx::Postgres;
use tokio::{sync::Mutex, time::timeout};
use tower_fence::{Fence, Resource, epochs::Epochs, lease::Leases};

use super::stop::Stop;
use crate::{
    database::reach,
    failure::{Failure, UNAVAILABLE, chain},
};

/// How long a store may take.
const LIMIT: Duration = Duration::from_secs(2);
/// How long it may take to find out why the database does not answer.
const WHY: Duration = Duration::from_secs(1);
/// How long what was found counts: whoever asks all the time costs the stores one look a second.
const FRESH: Duration = Duration::from_secs(1);

type Look = Box<dyn Fn() -> BoxFuture<'static, Result<(), String>> + Send + Sync>;

/// Looks after the stores.
pub struct Health {
    database: Look,
    leases: Look,
    found: Mutex<Option<(Instant, Found)>>,
    stop: Option<Stop>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
struct Found {
    database: bool,
    leases: bool,
}

impl Health {
    /// `in_redis` has its epochs in the database.
    pub fn of<L: Leases + Clone>(fence: Fence<Postgres>, leases: L, in_redis: bool) -> Self {
        let database: Look = Box::new(move || {
            let fence = fence.clone();
            Box::pin(async move {
                let asked = async {
                    if in_redis {
                        return fence
                            .source_id()
                            .await
                            .map_err(|error| chain(&error))
                            .map(drop);
                    }
                    let asked = sqlx::query("SELECT 1").execute(fence.get_pool()).await;
                    asked.map(drop).map_err(|error| chain(&error))
                };
                match timeout(LIMIT, asked).await {
                    Ok(Err(error)) => Err(error),
                    Ok(Ok(())) => Ok(()),
                    Err(_) => reach(&fence, WHY)
                        .await
                        .and(Err("it is slow, or the pool is busy".into())),
                }
            })
        });
        let leases: Look = Box::new(move || {
            let leases = leases.clone();
            Box::pin(async move {
                // Only looked at: no row is made.
                let probe = Resource::new("readyz").map_err(|error| chain(&error))?;
                let found = leases.inspect(&probe).await;
                found.map(drop).map_err(|error| chain(&error))
            })
        });
        Self {
            database,
            leases,
            found: Mutex::default(),
            stop: None,
        }
    }

    /// The same, and never ready once the server stops.
    pub fn until(mut self, stop: Stop) -> Self {
        self.stop = Some(stop);
        self
    }

    /// Tells in the log whether the stores answer now.
    pub async fn tell(&self) {
        if self.look().await.is_ready() {
            tracing::info!("ready");
        }
    }

    /// Looks at both stores, unless somebody has just done so.
    async fn look(&self) -> Found {
        let mut last = self.found.lock().await;
        if let Some((at, found)) = *last
            && at.elapsed() < FRESH
        {
            return found;
        }
        let (database, leases) = tokio::join!(
            answers("database", &self.database),
            answers("lease store", &self.leases)
        );
        let found = Found { database, leases };
        *last = Some((Instant::now(), found));
        found
    }
}

impl Found {
    const fn is_ready(self) -> bool {
        self.database && self.leases
    }
}

async fn answers(store: &str, look: &Look) -> bool {
    let error = match timeout(LIMIT + WHY, look()).await {
        Ok(Ok(())) => return true,
        Ok(Err(error)) => error,
        Err(_) => "no answer in time".into(),
    };
    let error = Failure::new(UNAVAILABLE, error).for_people();
    tracing::warn!(store, error, "a store does not answer: not ready");
    false
}

pub async fn alive() -> impl IntoResponse {
    no_store(StatusCode::OK, json!({"status": "alive"}))
}

pub async fn ready(State(health): State<Arc<Health>>) -> impl IntoResponse {
    let unavailable = StatusCode::SERVICE_UNAVAILABLE;
    if health.stop.as_ref().is_some_and(Stop::has_begun) {
        return no_store(unavailable, json!({"status": "stopping"}));
    }
    let found = health.look().await;
    let text = |answers| if answers { "ok" } else { "unavailable" };
    let (database, leases) = (text(found.database), text(found.leases));
    let (code, status) = match found.is_ready() {
        true => (StatusCode::OK, "ready"),
        false => (unavailable, "unavailable"),
    };
    no_store(
        code,
        json!({"status": status, "database": database, "leases": leases}),
    )
}

fn no_store(status: StatusCode, body: serde_json::Value) -> impl IntoResponse {
    let header = (CACHE_CONTROL, HeaderValue::from_static("no-store"));
    (status, [header], Json(body))
}
