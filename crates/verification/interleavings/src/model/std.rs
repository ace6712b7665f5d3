//! Replacements for the locks and atomics of `std`. At each operation, the scheduler may choose
//! another task.

pub use ::std::*;

pub mod sync {
    pub use super::super::sync::OnceLock;
    pub use ::std::sync::*;
    pub use shuttle::sync::{Mutex, MutexGuard, RwLock};

    pub mod atomic {
        pub use ::std::sync::atomic::*;
        pub use shuttle::sync::atomic::{AtomicBool, AtomicI64, AtomicU32, AtomicU64, AtomicUsize};
    }
}
