//! Requests that list the held leases or break a lease.

use std::{sync::Arc, time::Duration};

use axum::{
    Json as Answer,
    extract::State,
    response::{IntoResponse, Response},
};
use http::StatusCode;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;
use tracing::Instrument;

use crate::{
    Console,
    page::NO_STORE,
    rejection::Rejection,
    request::{Json, Query, rows},
};
use tower_fence::{
    FenceDatabase, Resource, Token,
    lease::{Held, LeaseAdmin, LeaseError, Page},
};

/// The number of leases that a search reads from the store at a time. A Redis store scans all its
/// keys for each page. Issuers and etcd stores return at most 1,000 leases in a page.
const CHUNK: usize = 1_000;
/// The maximum number of leases that a search examines for one response.
const MOST_EXAMINED: usize = 20_000;
/// The time after which a search reads no further leases for one response.
const SEARCH_TIME: Duration = Duration::from_secs(3);

#[derive(Deserialize)]
pub(super) struct Paging {
    limit: Option<u16>,
    cursor: Option<String>,
    search: Option<String>,
}

#[derive(Serialize)]
struct Listed {
    resource: Resource,
    #[serde(flatten)]
    held: Held,
}

#[derive(Serialize)]
struct Leases {
    leases: Vec<Listed>,
    /// The cursor of the next page; null on the last page.
    cursor: Option<String>,
    /// The number of leases that were examined for this page.
    examined: usize,
}

pub(super) async fn list<DB: FenceDatabase, L: LeaseAdmin>(
    State(console): State<Arc<Console<DB, L>>>,
    Query(paging): Query<Paging>,
) -> Result<Response, Rejection> {
    let limit = rows(paging.limit)?.into();
    let cursor = paging.cursor.filter(|cursor| !cursor.is_empty());
    let search = paging.search.filter(|search| !search.is_empty());
    let (page, examined) = match search {
        None => {
            let page = console.leases.list(limit, cursor.as_deref()).await?;
            let found = page.leases.len();
            (page, found)
        }
        Some(search) => find(&console.leases, &search.to_lowercase(), limit, cursor).await?,
    };
    let leases = page.leases.into_iter();
    let leases = Leases {
        leases: leases
            .map(|(resource, held)| Listed { resource, held })
            .collect(),
        cursor: page.cursor,
        examined,
    };
    Ok(([NO_STORE], Answer(leases)).into_response())
}

/// Searches for leases whose resource or owner contains `text`. The search stops when it has found
/// `enough` leases, has examined [`MOST_EXAMINED`] leases, or has taken [`SEARCH_TIME`]. The next
/// page continues from there. The search does not split pages of the store, so it can exceed these
/// limits.
async fn find<L: LeaseAdmin>(
    leases: &L,
    text: &str,
    enough: usize,
    mut cursor: Option<String>,
) -> Result<(Page, usize), Rejection> {
    let began = Instant::now();
    let mut examined = 0;
    // A common text fits most leases, so the first pages are short.
    let mut chunk = enough;
    let mut found = Page::default();
    loop {
        let page = leases.list(chunk, cursor.as_deref()).await?;
        chunk = (2 * chunk).min(CHUNK);
        examined += page.leases.len();
        let fits = |(resource, held): &(Resource, Held)| {
            let owner = held.owner.as_ref().map(|owner| owner.as_str());
            [Some(resource.as_str()), owner]
                .iter()
                .flatten()
                .any(|name| name.to_lowercase().contains(text))
        };
        found.leases.extend(page.leases.into_iter().filter(fits));
        cursor = page.cursor;
        let goes_on = found.leases.len() < enough
            && examined < MOST_EXAMINED
            && began.elapsed() < SEARCH_TIME;
        if cursor.is_none() || !goes_on {
            found.cursor = cursor;
            return Ok((found, examined));
        }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Break {
    resource: Resource,
    /// The token that the operator has seen. Only a lease with this token is broken.
    token: Token,
}

pub(super) async fn break_lease<DB: FenceDatabase, L: LeaseAdmin>(
    State(console): State<Arc<Console<DB, L>>>,
    Json(Break { resource, token }): Json<Break>,
) -> Result<Response, Rejection> {
    let subject = resource.clone();
    let breaking = async move {
        let broken = console.leases.break_lease(&subject, Some(token)).await;
        let (resource, token) = (subject.as_str(), token.get());
        match &broken {
            Ok(true) => tracing::warn!(resource, token, "broke a lease from the console"),
            Err(LeaseError::Unavailable(_)) => tracing::warn!(
                resource,
                token,
                "a lease may have been broken from the console: the store has not confirmed it"
            ),
            _ => {}
        }
        broken
    };
    // The lease may be broken even if the operator disconnects. The task logs it nevertheless.
    let task = tokio::spawn(breaking.in_current_span()).await;
    match task.unwrap_or_else(|stopped| Err(LeaseError::unavailable(stopped)))? {
        true => Ok((StatusCode::NO_CONTENT, [NO_STORE]).into_response()),
        false => Err(LeaseError::Lost { resource }.into()),
    }
}
