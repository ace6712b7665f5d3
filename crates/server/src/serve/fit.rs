//! Checks at the start that the tables exist, that `PUBLIC` may not execute the functions, and that
//! there is no unexpected pooler. If the database does not answer, the server starts nevertheless,
//! and repeats the check until it has a result.

use std::time::Duration;

use sqlx::Postgres;
use tokio::time::{sleep, timeout};
use tower_fence::Fence;

use crate::{
    database::{DatabaseArgs, failed},
    failure::{Failure, UNAVAILABLE},
};

/// The timeout of a check.
const LIMIT: Duration = Duration::from_secs(3);
/// The pause between two checks of a database that did not answer at the start.
const AGAIN: Duration = Duration::from_secs(1);

/// The database of a server that is starting.
pub struct Fit<'a> {
    pub args: &'a DatabaseArgs,
    pub fence: Fence<Postgres>,
    pub place: String,
}

impl Fit<'_> {
    /// Checks the database. Returns `false` if it does not answer yet, and an error if it is unfit.
    pub async fn at_start(&self) -> Result<bool, Failure> {
        match self.check().await {
            Err(failure) if failure.status == UNAVAILABLE => {
                let error = failure.text;
                tracing::warn!(error, "the database cannot be checked yet");
                Ok(false)
            }
            checked => checked.map(|()| true),
        }
    }

    /// Repeats the check if [`at_start`](Self::at_start) found no fit database. Returns the reason
    /// if the database is unfit, and never returns otherwise.
    pub async fn until_unfit(&self, is_fit: bool) -> Failure {
        if is_fit {
            return std::future::pending().await;
        }
        loop {
            sleep(AGAIN).await;
            match self.check().await {
                Err(failure) if failure.status == UNAVAILABLE => {}
                Err(failure) => return failure,
                Ok(()) => return std::future::pending().await,
            }
        }
    }

    async fn check(&self) -> Result<(), Failure> {
        let checking = async {
            self.args.refuse_poolers(&self.fence, &self.place).await?;
            let checked = self.fence.check().await;
            checked.map_err(|error| failed("cannot check the fence", &self.place, &error))
        };
        let silent = |_| Failure::new(UNAVAILABLE, "no answer in time");
        timeout(LIMIT, checking).await.map_err(silent)?
    }
}
