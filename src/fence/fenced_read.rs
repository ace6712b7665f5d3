//! A fenced read: once it is answered everyone older is dead, and no write of theirs lies behind what
//! it has seen.
//!
//! Nothing may be raised before somebody is served who is turned away in the end, and nothing is
//! held while the read goes on, neither a row lock nor a connection. So it is done in two steps:
//!
//! 1. Look at the rows first. Where everyone older is dead already, that is all.
//! 2. After the read, raise what was not, and say whether any of these rows was written to
//!    since the look. Every fenced write makes a new version of its row, and the raise waits for
//!    the row's lock: where the version is the old one, no write came in between. Otherwise what was
//!    read may be older than such a write, and the read must be repeated; now that the fence
//!    is raised, nobody older writes any more.

use super::{
    AdmitError, Admitted, AllAdmitted, Fence, FenceDatabase, Stale, TokenUse, raise::commit,
    session::Session,
};

/// A row of the fence as it was before a read.
pub struct RowVersion {
    pub max_token: i64,
    /// What no later version of the row has, or nothing that can be told apart.
    pub version: Option<String>,
}

/// What has to be raised after a read, and which versions the rows had before it.
pub(crate) struct ToRaise(Vec<(Admitted, Option<String>)>);

impl<DB: FenceDatabase> Fence<DB> {
    /// Looks at the rows of what is to be read. `None` where everyone older is dead already.
    pub(crate) async fn look(&self, all: &AllAdmitted) -> Result<Option<ToRaise>, AdmitError> {
        self.check_dead(all)?;
        // In a transaction, since a pooler in between gives each one a server of its own.
        let mut session = Session::begin(&self.connections, self.limits).await?;
        let tables = self.tables(&mut session).await?;
        let mut to_raise = Vec::new();
        for one in all.in_lock_order() {
            let row = session
                .run(async |conn| DB::row_version(conn, &tables, &one.resource).await)
                .await?;
            let Some(row) = row else {
                to_raise.push((one.clone(), None));
                continue;
            };
            if row.max_token >= one.token.get() {
                return Err(self
                    .refused(Stale {
                        resource: one.resource.clone(),
                        presented: one.token,
                        max_token: row.max_token,
                    })
                    .into());
            }
            // Whoever writes meanwhile holds a row that nobody older can have locked.
            if row.max_token < TokenUse::Reusable.floor(one.token) {
                to_raise.push((one.clone(), row.version));
            }
        }
        Ok((!to_raise.is_empty()).then_some(ToRaise(to_raise)))
    }

    /// Raises what was not raised before the read. True where nobody has written since the look.
    pub(crate) async fn raise_after(
        &self,
        all: &AllAdmitted,
        to_raise: ToRaise,
    ) -> Result<bool, AdmitError> {
        let _turns = self.turns(all).await?;
        let mut session = Session::begin(&self.connections, self.limits).await?;
        let tables = self.tables(&mut session).await?;
        let unwritten = session
            .run(async |conn| {
                for (Admitted { resource, token }, version) in &to_raise.0 {
                    let Some(version) = version else {
                        return Ok(false);
                    };
                    let floor = TokenUse::Reusable.floor(*token);
                    if !DB::raise_if_unwritten(conn, &tables, resource, floor, version).await? {
                        return Ok(false);
                    }
                }
                Ok(true)
            })
            .await?;
        if unwritten {
            commit(session).await?;
        } else {
            self.raise_on(session, all).await?;
        }
        Ok(unwritten)
    }
}
