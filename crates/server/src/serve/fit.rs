//! What has to hold of the database before the server grants leases from it: its tables are there, and only the roles
//! that were granted rights may use them. A database that does not answer is waited for.

use std::time::Duration;

use sqlx::Postgres;
use tokio::time::{sleep, timeout};
use tower_fence::{AdmitError, Fence};

use crate::{
    database::DatabaseArgs,
    failure::{Failure, UNAVAILABLE, chain},
};

/// How long the database may take to answer at the start.
const LIMIT: Duration = Duration::from_secs(3);
/// How often a database is tried that has not answered at the start.
const AGAIN: Duration = Duration::from_secs(1);

/// The database of a server that starts.
pub struct Fit<'a> {
    pub args: &'a DatabaseArgs,
    pub fence: Fence<Postgres>,
    pub place: String,
}

impl Fit<'_> {
    /// Whether the database is known to be fit for use. It need not answer yet.
    pub async fn at_start(&self) -> Result<bool, Failure> {
        match self.look().await {
            Err(failure) if failure.status == UNAVAILABLE => {
                let error = failure.text;
                tracing::warn!(%error, "the database cannot be checked yet");
                Ok(false)
            }
            looked => looked.map(|()| true),
        }
    }

    /// Waits for a database that has not answered at the start; returns why it is unfit for use, or never.
    pub async fn until_unfit(&self, known: bool) -> Failure {
        if known {
            return std::future::pending().await;
        }
        loop {
            sleep(AGAIN).await;
            match self.look().await {
                Err(failure) if failure.status == UNAVAILABLE => {}
                Err(failure) => return failure,
                Ok(()) => return std::future::pending().await,
            }
        }
    }

    async fn look(&self) -> Result<(), Failure> {
        let looking = async {
            self.args.refuse_poolers(&self.fence, &self.place).await?;
            match self.fence.check().await {
                Ok(()) => Ok(()),
                Err(AdmitError::NotMigrated(cause) | AdmitError::Misconfigured(cause)) => {
                    let (place, cause) = (&self.place, chain(&cause));
                    Err(Failure::configuration(format!("{place}: {cause}")))
                }
                Err(error) => Err(Failure::unavailable("no look at the fence", &error)),
            }
        };
        let silent = |_| Failure::new(UNAVAILABLE, "no answer in time");
        timeout(LIMIT, looking).await.map_err(silent)?
    }
}
