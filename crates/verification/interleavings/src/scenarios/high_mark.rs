//! A request finds each number that was granted before the request. Only one task at a time reads
//! the highest granted number.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicI64, Ordering::SeqCst},
    },
    time::Duration,
};

use super::{all, some_ms, tasks};
use crate::{
    fence::local::high_mark::HighMark,
    model::{clock::sleep, step, tokio::time::timeout},
};

pub async fn issued_number_is_never_refused() {
    let mark = Arc::new(HighMark::<()>::default());
    let highest = Arc::new(AtomicI64::new(0));
    let looking = Arc::new(AtomicBool::new(false));
    let askers = tasks(4, |n| {
        let (mark, highest, looking) = (mark.clone(), highest.clone(), looking.clone());
        async move {
            let look = async || {
                struct Looking(Arc<AtomicBool>);
                impl Drop for Looking {
                    fn drop(&mut self) {
                        self.0.store(false, SeqCst);
                    }
                }
                assert!(!looking.swap(true, SeqCst), "two concurrent reads");
                let _looking = Looking(looking.clone());
                let found = highest.load(SeqCst);
                step();
                sleep(some_ms([0, 1])).await;
                Ok(found)
            };
            match n {
                0 => assert_eq!(mark.has(1_000, look).await, Ok(false)),
                1 => drop(timeout(some_ms([0, 1]), mark.has(1_000, look)).await),
                _ => {
                    let number = highest.fetch_add(1, SeqCst) + 1;
                    step();
                    assert_eq!(mark.has(number, look).await, Ok(true));
                }
            }
        }
    });
    all(askers).await;
}
