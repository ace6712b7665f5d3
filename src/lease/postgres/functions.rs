//! The calls of the functions, and their answers.

use std::{sync::Arc, time::Duration};

use sqlx::{Row, postgres::PgRow};

use crate::{
    announce::LeaseDigest,
    calls::{
        Argument,
        Argument::{Bytes, Integer, Text, Texts, Truth},
        CallError, Calls, FunctionCall, literal_text,
    },
    chain::Chain,
    lease::{
        Acquire, Held, LeaseError, LeaseId, ListError, Owner, Page, Renew,
        time::{at_least_1_ms, whole_ms},
    },
    token::{Resource, Token},
};

/// An expression that makes the COMMIT of its transaction wait for the disk where this is the outcome, and otherwise not.
/// Whoever waits for more, for a standby, goes on to do so.
macro_rules! durable_if {
    ($outcome:literal) => {
        concat!(
            "CASE WHEN a.outcome <> '",
            $outcome,
            "' THEN pg_catalog.set_config('synchronous_commit', 'off', true) \
             WHEN pg_catalog.current_setting('synchronous_commit') IN ('off', 'local') \
             THEN pg_catalog.set_config('synchronous_commit', 'on', true) END"
        )
    };
}

/// What became of a request for a lease.
#[derive(Debug)]
pub(super) enum Asked {
    /// Granted, or repeated. Where others wait behind it, the first of them has to be told.
    Granted { token: Token, others_wait: bool },
    /// There is no token above this one.
    Exhausted(i64),
    /// It is not in line.
    Held { closed: Duration },
    /// It is in line.
    Queued,
    /// It is the first in line.
    First { closed: Duration },
    /// Too many wait.
    Full,
    /// Another transaction was in the way, for a moment.
    Again,
}

/// What became of a renewal.
#[derive(Debug)]
pub(super) enum Renewed {
    Granted(Token),
    Lost,
    Exhausted(i64),
    Again,
}

/// The part of a request that is the same each time it is asked.
pub(super) struct Request {
    pub(super) resource: Resource,
    pub(super) lease: LeaseDigest,
    /// Tells the request from others under the same lease id.
    pub(super) ticket: i64,
    ttl_ms: i64,
    lock_delay_ms: i64,
    owner: Option<Owner>,
}

impl Request {
    pub(super) fn new(resource: &Resource, request: &Acquire) -> Self {
        Self {
            resource: resource.clone(),
            lease: LeaseDigest::of(request.lease_id.expose()),
            ticket: rand::random(),
            ttl_ms: signed(at_least_1_ms(request.ttl)),
            lock_delay_ms: signed(whole_ms(request.lock_delay)),
            owner: request.owner.clone(),
        }
    }
}

/// The functions of one database.
#[derive(Clone)]
pub(super) struct Functions {
    pub(super) database: Arc<dyn Calls>,
}

impl Functions {
    /// Asks for a lease. With a listener, the request joins the line; one that is `in_line` and has none
    /// leaves it.
    pub(super) async fn ask(
        &self,
        request: &Request,
        in_line: bool,
        listener: Option<i64>,
        max_waiters: usize,
    ) -> Result<Asked, LeaseError> {
        let row = self
            .one(FunctionCall {
                function: "lease_ask",
                arguments: &[
                    Text(Some(request.resource.as_str())),
                    Bytes(Some(request.lease.as_bytes())),
                    Integer(Some(request.ttl_ms)),
                    Integer(Some(request.lock_delay_ms)),
                    Text(request.owner.as_ref().map(Owner::as_str)),
                    Integer(Some(request.ticket)),
                    Truth(in_line),
                    Integer(listener),
                    Integer(Some(i64::try_from(max_waiters).unwrap_or(i64::MAX))),
                ],
                columns: concat!(
                    "a.outcome, a.token, a.closed_ms, a.others_wait, ",
                    durable_if!("granted")
                ),
                lazily: false,
                resource: Some(&request.resource),
            })
            .await?;
        let closed = || unsigned(&row, "closed_ms").map(Duration::from_millis);
        Ok(match row.try_get("outcome").map_err(unavailable)? {
            "granted" | "repeated" => Asked::Granted {
                token: token(&row)?,
                others_wait: row.try_get("others_wait").map_err(unavailable)?,
            },
            "exhausted" => Asked::Exhausted(row.try_get("token").map_err(unavailable)?),
            "held" => Asked::Held { closed: closed()? },
            "queued" => Asked::Queued,
            "first" => Asked::First { closed: closed()? },
            "full" => Asked::Full,
            _ => Asked::Again,
        })
    }

    pub(super) async fn renew(
        &self,
        resource: &Resource,
        id: &LeaseId,
        request: Renew,
    ) -> Result<Renewed, LeaseError> {
        let lease = LeaseDigest::of(id.expose());
        let row = self
            .one(FunctionCall {
                function: "lease_renew",
                arguments: &[
                    Text(Some(resource.as_str())),
                    Bytes(Some(lease.as_bytes())),
                    Integer(Some(signed(at_least_1_ms(request.ttl)))),
                    Truth(request.new_token),
                    Integer(request.at_least.map(Token::get)),
                ],
                columns: concat!("a.outcome, a.token, ", durable_if!("renewed")),
                lazily: false,
                resource: Some(resource),
            })
            .await?;
        Ok(match row.try_get("outcome").map_err(unavailable)? {
            "kept" | "renewed" => Renewed::Granted(token(&row)?),
            "lost" => Renewed::Lost,
            "exhausted" => Renewed::Exhausted(row.try_get("token").map_err(unavailable)?),
            _ => Renewed::Again,
        })
    }

    /// Ends the lease that is held under an id; without one, whatever keeps the resource closed, where that has the token
    /// that was seen.
    pub(super) async fn end(
        &self,
        resource: &Resource,
        id: Option<&LeaseId>,
        seen: Option<Token>,
    ) -> Result<bool, LeaseError> {
        let lease = id.map(|id| LeaseDigest::of(id.expose()));
        let lease = lease.as_ref().map(|lease| &lease.as_bytes()[..]);
        let ended = self
            .lazily(
                "lease_end",
                Some(resource),
                &[
                    Text(Some(resource.as_str())),
                    Bytes(lease),
                    Integer(None),
                    Integer(seen.map(Token::get)),
                ],
            )
            .await?;
        ended.try_get("answer").map_err(unavailable)
    }

    /// Takes a request back: out of the line, and what was granted to it alone.
    pub(super) async fn abandon(&self, request: &Request) -> Result<(), LeaseError> {
        let arguments = [
            Text(Some(request.resource.as_str())),
            Bytes(Some(request.lease.as_bytes())),
            Integer(Some(request.ticket)),
        ];
        let resource = Some(&request.resource);
        self.lazily("lease_abandon", resource, &arguments).await?;
        Ok(())
    }

    /// Tells the first in line how long the resource stays closed.
    pub(super) async fn call_first(&self, resource: &Resource) -> Result<(), LeaseError> {
        let arguments = [Text(Some(resource.as_str()))];
        self.lazily("lease_call", Some(resource), &arguments)
            .await?;
        Ok(())
    }

    /// Removes from all lines those whose processes have died, in a task.
    pub(super) fn sweep_in_background(&self) {
        let functions = self.clone();
        tokio::spawn(async move {
            if let Err(error) = functions.lazily("lease_sweep", None, &[]).await {
                tracing::debug!(error = %Chain(&error), "the lines of waiters were not swept");
            }
        });
    }

    /// Which of these resources are open. The listener is sent an empty notification.
    pub(super) async fn open(
        &self,
        resources: &[String],
        listener: i64,
    ) -> Result<Vec<String>, LeaseError> {
        let call = FunctionCall {
            function: "lease_open",
            arguments: &[Texts(resources), Integer(Some(listener))],
            columns: "a.answer",
            lazily: true,
            resource: None,
        };
        let rows = self.database.call_function(call).await;
        let rows = rows.map_err(failed)?;
        let names = rows.iter().map(|row| row.try_get("answer"));
        names.collect::<Result<_, _>>().map_err(unavailable)
    }

    pub(super) async fn inspect(&self, resource: &Resource) -> Result<Option<Held>, LeaseError> {
        let condition = format!("h.resource = {}", literal_text(resource.as_str()));
        let rows = self.held(&condition, 1).await?;
        let held = rows.first().map(held_lease).transpose()?;
        Ok(held.map(|(_, held)| held))
    }

    pub(super) async fn list(&self, limit: usize, cursor: Option<&str>) -> Result<Page, ListError> {
        let after = match cursor {
            None => "",
            Some(cursor) => cursor.strip_prefix(CURSOR).ok_or(ListError::Cursor)?,
        };
        if after.contains('\0') {
            return Err(ListError::Cursor);
        }
        let limit = limit.max(1);
        let condition = format!("h.resource > {}", literal_text(after));
        let rows = self.held(&condition, limit.saturating_add(1)).await?;
        let leases: Result<Vec<_>, LeaseError> = rows.iter().take(limit).map(held_lease).collect();
        let leases = leases?;
        let last = leases.last().filter(|_| rows.len() > limit);
        let cursor = last.map(|(resource, _)| format!("{CURSOR}{resource}"));
        Ok(Page { leases, cursor })
    }

    async fn held(&self, condition: &str, limit: usize) -> Result<Vec<PgRow>, LeaseError> {
        let look = |prefix: &str| {
            format!(
                "SELECT h.resource, h.token, h.owner, h.waiters, \
                 pg_catalog.ceil(extract(epoch FROM h.expires_in) * 1000)::bigint AS left_ms \
                 FROM {prefix}held_leases AS h WHERE {condition} ORDER BY h.resource LIMIT {limit}"
            )
        };
        self.database.call(Box::new(look)).await.map_err(failed)
    }

    /// Calls a function that makes no token: its COMMIT need not wait for the disk.
    async fn lazily(
        &self,
        function: &'static str,
        resource: Option<&Resource>,
        arguments: &[Argument<'_>],
    ) -> Result<PgRow, LeaseError> {
        self.one(FunctionCall {
            function,
            arguments,
            columns: "a.answer",
            lazily: true,
            resource,
        })
        .await
    }

    async fn one(&self, call: FunctionCall<'_>) -> Result<PgRow, LeaseError> {
        let rows = self.database.call_function(call).await;
        let row = rows.map_err(failed)?.into_iter().next_back();
        row.ok_or_else(|| unavailable(sqlx::Error::RowNotFound))
    }
}

/// What the cursor of a page begins with; the name that was listed last follows.
const CURSOR: &str = "after:";

fn held_lease(row: &PgRow) -> Result<(Resource, Held), LeaseError> {
    let name: String = row.try_get("resource").map_err(unavailable)?;
    let owner: Option<String> = row.try_get("owner").map_err(unavailable)?;
    let held = Held {
        token: token(row)?,
        // Whatever other programs have written there.
        owner: owner.and_then(|owner| Owner::new(owner).ok()),
        ttl: Duration::from_millis(unsigned(row, "left_ms")?),
        waiters: unsigned(row, "waiters")?,
    };
    Ok((Resource::new(name).map_err(LeaseError::unavailable)?, held))
}

fn token(row: &PgRow) -> Result<Token, LeaseError> {
    let token: i64 = row.try_get("token").map_err(unavailable)?;
    Token::new(token).map_err(LeaseError::unavailable)
}

fn unsigned(row: &PgRow, column: &str) -> Result<u64, LeaseError> {
    let number: i64 = row.try_get(column).map_err(unavailable)?;
    Ok(u64::try_from(number).unwrap_or(0))
}

fn unavailable(error: sqlx::Error) -> LeaseError {
    LeaseError::unavailable(error)
}

fn failed(error: CallError) -> LeaseError {
    match error.is_misconfigured {
        true => LeaseError::misconfigured(error),
        false => LeaseError::unavailable(error),
    }
}

/// Milliseconds, of which there are at most a century.
fn signed(ms: u64) -> i64 {
    i64::try_from(ms).unwrap_or(i64::MAX)
}
