//! Replacements for the tasks and timers of `tokio`. They use the scheduler and the model's clock.

pub use super::{runtime::spawn, sync};
pub use crate::__select as select;
pub use ::tokio::{join, pin};

pub mod runtime {
    pub use crate::model::runtime::{Handle, TryCurrentError};
}

pub mod task {
    pub use crate::model::runtime::{JoinHandle, spawn};
    pub use shuttle::future::{AbortHandle, yield_now};
}

pub mod time {
    pub use crate::model::clock::{Instant, Sleep, sleep, sleep_until};
    pub use ::std::time::Duration;

    pub mod error {
        #[derive(Debug, PartialEq, Eq)]
        pub struct Elapsed;
    }

    pub async fn timeout<F: Future>(
        within: Duration,
        future: F,
    ) -> Result<F::Output, error::Elapsed> {
        timeout_at(Instant::now() + within, future).await
    }

    pub async fn timeout_at<F: Future>(
        until: Instant,
        future: F,
    ) -> Result<F::Output, error::Elapsed> {
        ::tokio::select! {
            biased;
            output = future => Ok(output),
            () = sleep_until(until) => Err(error::Elapsed),
        }
    }
}

/// A `select!` that polls its branches in order, so that an execution depends only on the
/// scheduler.
#[doc(hidden)]
#[macro_export]
macro_rules! __select {
    (biased; $($branches:tt)*) => { ::tokio::select! { biased; $($branches)* } };
    ($($branches:tt)*) => { ::tokio::select! { biased; $($branches)* } };
}
