//! Requests that read fences or reset a fence.

use std::sync::Arc;

use axum::{
    Json as Answer,
    extract::State,
    response::{IntoResponse, Response},
};
use http::StatusCode;
use serde::{Deserialize, Serialize};

use crate::{
    Console,
    feed::now_ms,
    page::NO_STORE,
    rejection::Rejection,
    request::{Json, Query, rows},
};
use tower_fence::{
    FenceDatabase, Resource, Token,
    fence::FenceRow,
    lease::{Held, LeaseAdmin},
};

#[derive(Deserialize)]
pub(super) struct Name {
    resource: String,
}

#[derive(Serialize)]
struct Row {
    resource: Resource,
    max_token: i64,
    announced: Option<Token>,
    idle_ms: u64,
}

impl From<FenceRow> for Row {
    fn from(row: FenceRow) -> Self {
        Self {
            resource: row.resource,
            max_token: row.max_token,
            announced: row.announced,
            idle_ms: row.idle.as_millis() as u64,
        }
    }
}

/// The fence and the lease of a resource.
#[derive(Serialize)]
struct Known {
    resource: Resource,
    max_token: i64,
    row: Option<Row>,
    partition: u8,
    floor: i64,
    granted: i64,
    held_lease: Option<Held>,
    /// Milliseconds since 1970.
    now_ms: u64,
}

pub(super) async fn look_up<DB: FenceDatabase, L: LeaseAdmin>(
    State(console): State<Arc<Console<DB, L>>>,
    Query(Name { resource }): Query<Name>,
) -> Result<Response, Rejection> {
    let resource =
        Resource::new(resource).map_err(|error| Rejection::invalid("resource", error))?;
    let state = console.fence.state(&resource).await?;
    let held_lease = console.leases.inspect(&resource).await?;
    let known = Known {
        max_token: state.max_token(),
        row: state.row.map(Row::from),
        partition: state.partition,
        floor: state.floor,
        granted: state.granted,
        held_lease,
        now_ms: now_ms(),
        resource,
    };
    Ok(([NO_STORE], Answer(known)).into_response())
}

#[derive(Deserialize)]
pub(super) struct Paging {
    limit: Option<u16>,
    after: Option<String>,
    prefix: Option<String>,
}

#[derive(Serialize)]
struct Fences {
    fences: Vec<Row>,
    /// The resource after which the next page starts; null on the last page.
    after: Option<Resource>,
}

pub(super) async fn list<DB: FenceDatabase, L: LeaseAdmin>(
    State(console): State<Arc<Console<DB, L>>>,
    Query(paging): Query<Paging>,
) -> Result<Response, Rejection> {
    let limit = rows(paging.limit)?;
    let prefix = paging.prefix.unwrap_or_default();
    if prefix.len() > Resource::MAX_BYTES || prefix.contains('\0') {
        return Err(Rejection::invalid("prefix", "not a prefix of a name"));
    }
    let after = paging.after.filter(|after| !after.is_empty());
    let after = after.map(Resource::new).transpose();
    let after = after.map_err(|error| Rejection::invalid("after", error))?;
    let rows = console
        .fence
        .states(&prefix, after.as_ref(), limit.into())
        .await?;
    let is_full = rows.len() == usize::from(limit);
    let last = rows.last().map(|row| row.resource.clone());
    let fences = Fences {
        fences: rows.into_iter().map(Row::from).collect(),
        after: last.filter(|_| is_full),
    };
    Ok(([NO_STORE], Answer(fences)).into_response())
}

#[derive(Serialize)]
struct Floor {
    partition: u8,
    floor: i64,
}

pub(super) async fn floors<DB: FenceDatabase, L: LeaseAdmin>(
    State(console): State<Arc<Console<DB, L>>>,
) -> Result<Response, Rejection> {
    let floors = console.fence.floors().await?.into_iter();
    let floors: Vec<_> = floors
        .map(|(partition, floor)| Floor { partition, floor })
        .collect();
    Ok(([NO_STORE], Answer(floors)).into_response())
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Reset {
    resource: Resource,
    token: Token,
}

pub(super) async fn reset<DB: FenceDatabase, L: LeaseAdmin>(
    State(console): State<Arc<Console<DB, L>>>,
    Json(Reset { resource, token }): Json<Reset>,
) -> Result<Response, Rejection> {
    console.fence.reset(&resource, token).await?;
    Ok((StatusCode::NO_CONTENT, [NO_STORE]).into_response())
}
