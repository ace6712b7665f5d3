//! Calls to the SQL functions, and conversion of their results.
//!
//! The checks in `crates/verification/interleavings` replace this module with a model, and run the
//! [`store`](super::store) and the [`listener`](super::listener) as they are. Therefore the modules
//! stay separate.

use std::{
    sync::Arc,
    time::{Duration, UNIX_EPOCH},
};

use sqlx::{Row, postgres::PgRow};

use crate::{
    calls::{
        Argument,
        Argument::{Bytes, Integer, Text, Texts, Truth},
        CallError, Calls, FunctionCall, literal_text,
    },
    chain::Chain,
    lease::{
        Held, LeaseError, Owner, Page,
        backend::{Ask, End, Granted, Renewal, Reply, Waits},
        names::{cursor_after, last_of},
    },
    time::whole_ms,
    token::{Resource, Token},
};

/// Expands to the given columns, and an SQL expression that makes COMMIT wait for the disk if the
/// function returns a token. A lease that was reported as granted or renewed is then held until the
/// reported time, even after a crash. A setting of `synchronous_commit` that also makes COMMIT wait
/// for a standby stays unchanged. Without a token, COMMIT does not wait.
macro_rules! durable_with_token {
    ($columns:literal) => {
        concat!(
            $columns,
            ", CASE WHEN a.token IS NULL \
             THEN pg_catalog.set_config('synchronous_commit', 'off', true) \
             WHEN pg_catalog.current_setting('synchronous_commit') IN ('off', 'local') \
             THEN pg_catalog.set_config('synchronous_commit', 'on', true) END"
        )
    };
}

/// SQL functions of one database.
#[derive(Clone)]
pub(super) struct Functions {
    pub(super) database: Arc<dyn Calls>,
}

impl Functions {
    /// Requests a lease. If the lease is granted, also returns whether other requests wait for it.
    /// In that case, the first of them must be notified.
    pub(super) async fn ask(
        &self,
        resource: &Resource,
        ask: &Ask,
        waits: &Waits,
    ) -> Result<(Reply, bool), LeaseError> {
        let (is_queued, listener) = match waits {
            Waits::No => (false, None),
            // The listener is 0 if sessions cannot listen.
            Waits::Yes {
                listener, queued, ..
            } => (*queued, Some(*listener).filter(|listener| *listener != 0)),
            // A request that was in the queue and has no listener leaves the queue.
            Waits::Leaves => (true, None),
        };
        let row = self
            .one(FunctionCall {
                function: "lease_ask",
                arguments: &[
                    Text(Some(resource.as_str())),
                    Bytes(ask.lease.as_bytes()),
                    Integer(Some(signed(whole_ms(ask.ttl)))),
                    Integer(Some(signed(whole_ms(ask.lock_delay)))),
                    Text(ask.owner.as_ref().map(Owner::as_str)),
                    Integer(Some(ask.ticket)),
                    Truth(is_queued),
                    Integer(listener),
                ],
                columns: durable_with_token!("a.outcome, a.token, a.blocked_ms, a.others_wait"),
                without_flush: false,
                resource: Some(resource),
                assigns_token: true,
            })
            .await?;
        let left = || unsigned(&row, "blocked_ms").map(Duration::from_millis);
        let reply = match row.try_get("outcome").map_err(unavailable)? {
            "granted" => {
                let others_wait = row.try_get("others_wait").map_err(unavailable)?;
                let granted = Granted::new(token(&row)?, ask.ttl);
                return Ok((Reply::Granted(granted), others_wait));
            }
            "exhausted" => Reply::Exhausted(row.try_get("token").map_err(unavailable)?),
            "held" => Reply::Held { left: left()? },
            "queued" => Reply::Queued {
                left: left()?,
                joined: false,
            },
            "displaced" => Reply::Displaced,
            "again" => Reply::Again,
            outcome => return Err(unknown(outcome)),
        };
        Ok((reply, false))
    }

    pub(super) async fn renew(
        &self,
        resource: &Resource,
        renewal: &Renewal,
    ) -> Result<Reply, LeaseError> {
        let row = self
            .one(FunctionCall {
                function: "lease_renew",
                arguments: &[
                    Text(Some(resource.as_str())),
                    Bytes(renewal.lease.as_bytes()),
                    Integer(Some(signed(whole_ms(renewal.ttl)))),
                    Truth(renewal.new_token),
                    Integer(renewal.at_least.map(Token::get)),
                ],
                columns: durable_with_token!("a.outcome, a.token"),
                without_flush: false,
                resource: Some(resource),
                assigns_token: renewal.may_take_token(),
            })
            .await?;
        Ok(match row.try_get("outcome").map_err(unavailable)? {
            "renewed" => Reply::Granted(Granted::new(token(&row)?, renewal.ttl)),
            "lost" => Reply::Lost,
            "exhausted" => Reply::Exhausted(row.try_get("token").map_err(unavailable)?),
            "again" => Reply::Again,
            outcome => return Err(unknown(outcome)),
        })
    }

    /// Releases or breaks a lease, or removes the traces of one request.
    pub(super) async fn end(&self, resource: &Resource, end: &End) -> Result<Reply, LeaseError> {
        let name = Text(Some(resource.as_str()));
        let (function, arguments) = match end {
            End::Release(lease) => ("lease_end", vec![name, Bytes(lease.as_bytes())]),
            End::Abandon { lease, ticket } => {
                let (id, ticket) = (Bytes(lease.as_bytes()), Integer(Some(*ticket)));
                ("lease_end", vec![name, id, ticket])
            }
            End::Break(token) => ("break_lease", vec![name, Integer(token.map(Token::get))]),
        };
        let row = self
            .without_flush(function, Some(resource), &arguments)
            .await?;
        Ok(match row.try_get("answer").map_err(unavailable)? {
            true => Reply::Ended,
            false => Reply::Lost,
        })
    }

    /// Notifies the first request in the queue of the time for which the resource stays blocked.
    pub(super) async fn call_first(&self, resource: &Resource) -> Result<(), LeaseError> {
        let arguments = [Text(Some(resource.as_str()))];
        self.without_flush("lease_call", Some(resource), &arguments)
            .await?;
        Ok(())
    }

    /// Returns the prefix of all names, such as `tower_fence.`.
    pub(super) async fn prefix(&self) -> Result<String, LeaseError> {
        self.database.prefix().await.map_err(failed)
    }

    /// Returns the error for a session that could not be registered as a listener.
    pub(super) fn not_registered(error: sqlx::Error) -> LeaseError {
        let code = error.as_database_error().and_then(|error| error.code());
        match code.as_deref() {
            // insufficient_privilege, undefined_function, undefined_table, undefined_column,
            // invalid_schema_name
            Some("42501" | "42883" | "42P01" | "42703" | "3F000") => {
                LeaseError::misconfigured(error)
            }
            _ => unavailable(error),
        }
    }

    /// Removes the waiters of terminated processes from all queues, in a background task.
    pub(super) fn sweep_in_background(&self) {
        let functions = self.clone();
        tokio::spawn(async move {
            if let Err(error) = functions.without_flush("lease_sweep", None, &[]).await {
                tracing::debug!(
                    error = Chain(&error).to_string(),
                    "could not remove the waiters of ended processes from the queues"
                );
            }
        });
    }

    /// Returns the resources of this list that are free, and sends the listener an empty
    /// notification.
    pub(super) async fn open(
        &self,
        resources: &[String],
        listener: i64,
    ) -> Result<Vec<String>, LeaseError> {
        let arguments = [Texts(resources), Integer(Some(listener))];
        let row = self.without_flush("lease_open", None, &arguments).await?;
        // In the text format, sqlx reads the name "NULL" as null.
        let names: Vec<Option<String>> = row.try_get("answer").map_err(unavailable)?;
        let name = |name: Option<String>| name.unwrap_or_else(|| "NULL".to_owned());
        Ok(names.into_iter().map(name).collect())
    }

    pub(super) async fn inspect(&self, resource: &Resource) -> Result<Option<Held>, LeaseError> {
        let condition = format!("h.resource = {}", literal_text(resource.as_str()));
        let rows = self.held(&condition, 1).await?;
        let held = rows.first().map(held_lease).transpose()?;
        Ok(held.map(|(_, held)| held))
    }

    pub(super) async fn list(
        &self,
        limit: usize,
        cursor: Option<&str>,
    ) -> Result<Page, LeaseError> {
        let after = last_of(cursor)?;
        if after.contains('\0') {
            return Err(LeaseError::invalid_cursor());
        }
        let limit = limit.clamp(1, i32::MAX as usize);
        let condition = format!("h.resource > {}", literal_text(after));
        let rows = self.held(&condition, limit + 1).await?;
        let leases = rows.iter().take(limit).map(held_lease);
        let leases = leases.collect::<Result<Vec<_>, _>>()?;
        let last = leases.last().filter(|_| rows.len() > limit);
        let cursor = last.map(|(resource, _)| cursor_after(resource));
        Ok(Page { leases, cursor })
    }

    async fn held(&self, condition: &str, limit: usize) -> Result<Vec<PgRow>, LeaseError> {
        let sql = |prefix: &str| {
            format!(
                "SELECT h.resource, h.token, h.owner, h.waiters, \
                 pg_catalog.floor(extract(epoch FROM h.granted_at))::bigint AS granted_at, \
                 pg_catalog.ceil(extract(epoch FROM h.expires_in) * 1000)::bigint AS left_ms \
                 FROM {prefix}held_leases AS h WHERE {condition} ORDER BY h.resource LIMIT {limit}"
            )
        };
        let rows = self.database.run_statements(Box::new(sql)).await;
        rows.map_err(failed)
    }

    /// Calls a function that assigns no token. Its COMMIT need not wait for the disk.
    async fn without_flush(
        &self,
        function: &'static str,
        resource: Option<&Resource>,
        arguments: &[Argument<'_>],
    ) -> Result<PgRow, LeaseError> {
        self.one(FunctionCall {
            function,
            arguments,
            columns: "a AS answer",
            without_flush: true,
            resource,
            assigns_token: false,
        })
        .await
    }

    async fn one(&self, call: FunctionCall<'_>) -> Result<PgRow, LeaseError> {
        let rows = self.database.call_function(call).await;
        let row = rows.map_err(failed)?.into_iter().next_back();
        row.ok_or_else(|| unavailable(sqlx::Error::RowNotFound))
    }
}

fn held_lease(row: &PgRow) -> Result<(Resource, Held), LeaseError> {
    let name: String = row.try_get("resource").map_err(unavailable)?;
    let owner: Option<String> = row.try_get("owner").map_err(unavailable)?;
    let mut held = Held::new(
        token(row)?,
        Duration::from_millis(unsigned(row, "left_ms")?),
    )
    // Other programs may have written an invalid label.
    .owner(owner.and_then(|owner| Owner::new(owner).ok()))
    .waiters(unsigned(row, "waiters")?);
    let since_1970 = Duration::from_secs(unsigned(row, "granted_at")?);
    held.granted_at = UNIX_EPOCH.checked_add(since_1970);
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

/// Returns the error for an outcome that this version does not support.
fn unknown(outcome: &str) -> LeaseError {
    LeaseError::misconfigured(UnknownOutcome(outcome.into()))
}

#[derive(Debug, thiserror::Error)]
#[error(
    "the SQL functions in the database belong to another version (unknown outcome `{0}`): migrate \
     the database, or update this program"
)]
struct UnknownOutcome(String);

fn failed(error: CallError) -> LeaseError {
    match error.is_misconfigured {
        true => LeaseError::misconfigured(error),
        false => LeaseError::unavailable(error),
    }
}

/// Converts milliseconds, which are at most 100 years.
fn signed(ms: u64) -> i64 {
    i64::try_from(ms).unwrap_or(i64::MAX)
}
