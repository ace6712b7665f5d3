//! A fenced read: once it is answered everyone older is dead, and no write of theirs lies behind what
//! it has seen.
//!
//! Nothing may be raised for a request that is turned away in the end, and nothing is
//! held while the read goes on, neither a row lock nor a connection. So it is done in two steps:
//!
//! 1. Look at the rows first. Where everyone older is dead already, and since no failover, that is all, once it is on
//!    the disk.
//! 2. After the read, raise what was not, and say whether any of these rows was written to
//!    since the look. Every fenced write makes a new version of its row, and the raise waits for
//!    the row's lock: where the version is the old one, no write came in between. Otherwise what was
//!    read may be older than such a write, and the read must be repeated; now that the fence
//!    is raised, nobody older writes any more.

use super::{raise::commit, retry::Tries};
use crate::{
    epochs::partition_of,
    fence::{
        Fence, TokenUse,
        claims::{AllAdmitted, Claim, Claims},
        error::AdmitError,
        fault::Fault,
        sql::{Dead, FenceDatabase},
        tx::Transaction,
    },
};

/// What has to be raised after a read, and which versions the rows had before it.
pub(crate) struct ToRaise(Vec<(Claim, Option<String>)>);

impl<DB: FenceDatabase> Fence<DB> {
    /// Looks at the rows of what is to be read, and admits the read. Nothing is to be raised where
    /// everyone older is dead already.
    pub(crate) async fn look(
        &self,
        claims: &Claims,
    ) -> Result<(AllAdmitted, Option<ToRaise>), AdmitError> {
        self.check_stale(claims)?;
        // In a transaction, since a pooler in between gives each one a server of its own.
        let limits = self.limits.locking(claims);
        let mut transaction = Transaction::begin(&self.connections, limits).await?;
        let tables = self.tables(&mut transaction).await?;
        let (mut to_raise, mut may_be_lost) = (Vec::new(), None);
        for one in claims.in_lock_order() {
            let row = transaction
                .run(async |conn| DB::row_version(conn, &tables, &one.resource).await)
                .await?;
            let (dead, version, is_behind) = match row {
                Some(row) => {
                    may_be_lost = row.may_be_lost.then_some(one).or(may_be_lost);
                    (Dead::by_row(row.max_token), row.version, row.is_behind)
                }
                None => {
                    let partition = partition_of(&one.resource);
                    let floor = async |conn: &mut _| DB::floor(conn, &tables, partition).await;
                    (Dead::by_floor(transaction.run(floor).await?), None, false)
                }
            };
            if dead.max_token >= one.token.get() {
                return Err(self.refused(dead.refuse(&one.resource, one.token)).into());
            }
            // Without a row, or where its token is lower than that, an older one can be admitted yet. What is of
            // another history is brought into this one by the raise, which may refuse the token.
            let is_raised = dead.max_token >= TokenUse::Reusable.dead(one.token);
            if dead.by_floor || is_behind || !is_raised {
                to_raise.push((one.clone(), version));
            }
        }
        // What is raised waits for the disk, and for all that came before it; and so does one row for all of them.
        if let (Some(one), true) = (may_be_lost, to_raise.is_empty()) {
            let outlast =
                async |conn: &mut _| DB::outlast_crash(conn, &tables, &one.resource).await;
            match transaction.run(outlast).await? {
                true => commit(transaction).await?,
                false => to_raise.push((one.clone(), None)),
            }
        }
        let to_raise = (!to_raise.is_empty()).then_some(ToRaise(to_raise));
        Ok((AllAdmitted::of(claims), to_raise))
    }

    /// Raises what was not raised before the read. True where nobody has written since the look.
    pub(crate) async fn raise_after(
        &self,
        claims: &Claims,
        to_raise: ToRaise,
    ) -> Result<bool, AdmitError> {
        let _permits = self.wait_in_queues(claims).await?;
        let limits = self.limits.locking(claims);
        let mut transaction = Transaction::begin(&self.connections, limits).await?;
        let tables = self.tables(&mut transaction).await?;
        let unwritten = transaction
            .run(async |conn| {
                for (Claim { resource, token }, version) in &to_raise.0 {
                    let Some(version) = version else {
                        return Ok(false);
                    };
                    let dead = TokenUse::Reusable.dead(*token);
                    if !DB::raise_if_unwritten(conn, &tables, resource, dead, version).await? {
                        return Ok(false);
                    }
                }
                Ok(true)
            })
            .await;
        match unwritten {
            Ok(true) => {
                commit(transaction).await?;
                return Ok(true);
            }
            Ok(false) => {
                let mut tries = Tries::new(limits);
                if self.raise_on(transaction, claims, &mut tries).await? {
                    return Ok(false);
                }
            }
            Err(failure) if failure.fault == Fault::Collision => drop(transaction),
            Err(failure) => return Err(failure.into()),
        }
        self.raise_all(claims).await?;
        Ok(false)
    }
}
