//! The routes for operators.

use std::sync::Arc;

use axum::{
    extract::{Query, State, rejection::QueryRejection},
    response::Response,
};
use http::HeaderMap;
use serde::Deserialize;

use super::{
    request::{ResourcePath, invalid, refuse_foreign_pages},
    response::{self, Rejection},
};
use crate::{
    lease::{LeaseError, ListError, Operate},
    metrics,
};

#[derive(Deserialize)]
pub(super) struct Paging {
    limit: Option<usize>,
    cursor: Option<String>,
}

pub(super) async fn list<L: Operate>(
    State(leases): State<Arc<L>>,
    paging: Result<Query<Paging>, QueryRejection>,
) -> Result<Response, Rejection> {
    let Query(paging) = paging.map_err(|_| {
        invalid(
            "query",
            "the query is `limit`, a number, and `cursor`, each once",
        )
    })?;
    let limit = paging.limit.unwrap_or(100);
    if !(1..=1_000).contains(&limit) {
        return Err(invalid("limit", "`limit` is from 1 to 1000"));
    }
    let cursor = paging.cursor.filter(|cursor| !cursor.is_empty());
    match leases.list(limit, cursor.as_deref()).await {
        Ok(page) => Ok(response::page(&page)),
        Err(ListError::Cursor) => Err(invalid("cursor", ListError::Cursor)),
        Err(ListError::Lease(error)) => Err(error.into()),
    }
}

pub(super) async fn break_lease<L: Operate>(
    State(leases): State<Arc<L>>,
    ResourcePath(resource): ResourcePath,
    headers: HeaderMap,
) -> Result<Response, Rejection> {
    refuse_foreign_pages(&headers)?;
    if leases.break_lease(&resource).await? {
        metrics::count("tower_fence_leases_broken_total");
        tracing::warn!(%resource, "ended a lease by force");
        return Ok(response::released());
    }
    Err(LeaseError::Lost { resource }.into())
}
