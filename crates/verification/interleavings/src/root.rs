// The checked files, and the modules that they need.
pub mod announce;
pub mod calls {
    pub use crate::model::postgres::functions::LeaseDatabase;
}
pub mod chain;
pub mod client {
    pub mod guard;
    pub mod held_lease;
    pub mod loss;
    pub mod renewal;
    pub use loss::Loss;

    pub mod layer {
        // Tasks share no state of this module.
        pub struct TokenLayer;

        impl TokenLayer {
            pub fn new(_: std::sync::Arc<super::held_lease::HeldLease>) -> Self {
                Self
            }
        }
    }
}
pub mod epochs;
pub mod events;
pub mod fence {
    pub mod claims;
    pub mod conn;
    pub mod error;
    pub mod fault;
    pub mod local {
        pub mod queue;
        pub use queue::Permit;
    }
    pub mod settings;
    pub mod sql {
        pub use crate::model::{
            sqlx::{Database as FenceDatabase, Names, TransactionManager, Transactions},
            transaction::TransactionId,
        };
    }
    pub mod tx {
        pub mod slot;
        pub use crate::model::transaction;
    }
}
pub mod header;
pub mod key_id;
pub mod lease;
pub mod live_tokens;
pub mod metrics {
    // The metrics that the scenarios check.
    use std::cell::Cell;

    thread_local! {
        pub static HELD: Cell<f64> = const { Cell::new(0.0) };
        pub static COUNTED: Cell<usize> = const { Cell::new(0) };
    }

    pub fn held(change: f64) {
        HELD.set(HELD.get() + change);
    }

    pub fn count_by(_: &'static str, _: &'static str, _: &'static str) {
        COUNTED.set(COUNTED.get() + 1);
    }

    pub fn count(_: &'static str) {}
}
#[path = "lease/postgres"]
pub mod postgres_queue {
    pub mod listener;
    pub mod store;
    pub use crate::model::postgres::functions;
}
pub mod problem;
#[path = "lease/redis"]
pub mod redis_queue {
    pub mod answer;
    pub mod listener;
    pub mod store;
    pub use crate::model::scripts::{connection, list, scripts, server};
}
pub mod sampler {
    // Tasks share only the time of the last log line.
    pub struct Sampler;

    impl Sampler {
        pub const fn new() -> Self {
            Self
        }

        pub fn next(&self) -> Option<u64> {
            None
        }
    }
}
pub mod stale;
pub mod time;
pub mod token;
pub mod token_keys;
