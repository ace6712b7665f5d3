//! A client that writes with idempotency keys, and retries each write whose response was lost.

use std::time::Duration;

use rand::RngExt;
use tokio::time::timeout;
use tower_fence::TokenUse;

use super::{Client, PATIENCE};
use crate::history::Answer;

impl Client {
    pub(super) async fn repeat(&mut self) -> Option<()> {
        let resource = self.choose();
        let (lease, held) = self.acquire(resource, 1).await?;
        for _ in 0..self.random.random_range(1..20) {
            let writing = self.writing(&[&held], &[1], None);
            let asked = self.asks(&[&held], &writing, TokenUse::Reusable);
            let key = writing.entry.to_string();
            let mut was_unknown = false;
            let answer = loop {
                // Some attempts give up before the response arrives.
                let patience = match self.random.random_bool(0.2) {
                    true => Duration::from_millis(self.random.random_range(1..10)),
                    false => PATIENCE,
                };
                let held = [&held];
                let request = self.try_write("/keyed", &held, &writing, Some(&key));
                match timeout(patience, request).await.unwrap_or(Answer::Unknown) {
                    // The layer returns the stored response of a key before it checks the token.
                    // Therefore, a refusal means that no attempt has written.
                    answer @ (Answer::Done | Answer::Refused) => break answer,
                    answer => was_unknown |= answer == Answer::Unknown,
                }
                if *self.stop.borrow() {
                    break if was_unknown {
                        Answer::Unknown
                    } else {
                        Answer::Undone
                    };
                }
                self.pause(Duration::from_millis(20)).await;
            };
            self.answered(asked, answer);
            if answer != Answer::Done {
                break;
            }
        }
        self.release(&lease).await;
        Some(())
    }
}
