//! Writes under idempotency keys, and repeats each write whose answer was lost.

use std::time::Duration;

use rand::RngExt;
use tokio::time::timeout;

use super::{Client, PATIENCE};
use crate::history::{Answer, Kind};

impl Client {
    pub(super) async fn repeat(&mut self) -> Option<()> {
        let resource = self.choose();
        let (lease, held) = self.acquire(resource, 1).await?;
        for _ in 0..self.random.random_range(1..20) {
            let writing = self.writing(&[&held], &[1], None);
            let (key, invoked) = (writing.entry.to_string(), self.now());
            let mut answer = Answer::Unknown;
            let mut was_unknown = false;
            for _ in 0..20 {
                // Some have no patience, and never hear of their write.
                let patience = match self.random.random_bool(0.2) {
                    true => Duration::from_millis(self.random.random_range(1..10)),
                    false => PATIENCE,
                };
                let held = [&held];
                let request = self.try_write("/keyed", &held, &writing, Some(&key));
                answer = timeout(patience, request).await.unwrap_or(Answer::Unknown);
                if answer != Answer::Unknown || *self.stop.borrow() {
                    break;
                }
                was_unknown = true;
                self.pause(Duration::from_millis(20)).await;
            }
            if answer == Answer::Refused && was_unknown {
                answer = Answer::Unknown;
            }
            let kind = Kind::Rewrite {
                entry: writing.entry,
                amount: 1,
            };
            self.record(&[&held], &[kind], invoked, answer);
            if answer != Answer::Done {
                break;
            }
        }
        self.release(&lease).await;
        Some(())
    }
}
