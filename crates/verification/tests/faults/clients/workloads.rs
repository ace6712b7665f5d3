//! What one client of each workload does, except those that use only SQL.

use std::time::{Duration, Instant};

use rand::RngExt;
use tokio::time::timeout;
use tower_fence::{
    TokenUse,
    client::{AcquireError, Holder},
};

use super::{Client, PATIENCE, PAUSE, TTL, call::not_granted, record::Held};
use crate::{history::Answer, service::Writing};

impl Client {
    /// Reads, pauses, and writes back, under a lease that is renewed.
    pub(super) async fn count(&mut self) -> Option<()> {
        let (resource, service) = (self.choose(), self.choose_service());
        let holder = Holder::new(self.servers.leases[service].clone());
        let holder = holder.ttl(TTL).wait(TTL);
        let request = async {
            let guard = holder.acquire(&self.side.names[resource]).await;
            let guard = guard.map_err(|error| match error {
                AcquireError::Lease(error) => not_granted(&error),
                error => panic!("{error:?}"),
            })?;
            let token = guard.fencing_token();
            Ok((guard, token))
        };
        let (guard, held) = self.side.grant(resource, request).await.ok()?;
        // Grants are announced, so a read after the grant needs no token.
        let with_tokens = self.side.is_fenced && self.random.random_bool(0.5);
        let read = self.read(&[&held], with_tokens).await?;
        self.think(20, 0.01).await;
        self.write(&[&held], &[1], Some(&read)).await;
        let _ = guard.release().await;
        Some(())
    }

    /// Adds to a set under a lease that is not renewed. Sometimes pauses for longer than the lease
    /// lasts.
    pub(super) async fn add_to_set(&mut self) -> Option<()> {
        let resource = self.choose();
        let (lease, held) = self.acquire(resource, 1).await.ok()?;
        let with_tokens = self.side.is_fenced && self.random.random_bool(0.5);
        let read = self.read(&[&held], with_tokens).await?;
        self.think(50, 0.1).await;
        self.write(&[&held], &[1], Some(&read)).await;
        // Some clients do not release their leases, as after a crash.
        if self.random.random_bool(0.95) {
            self.release(&lease).await;
        }
        Some(())
    }

    /// Moves amounts between two resources, whose sum must not change.
    pub(super) async fn transfer(&mut self) -> Option<()> {
        let resource = self.choose();
        // All clients use the same order, which prevents a deadlock.
        let (one, two) = (resource & !1, resource | 1);
        let (first, held_first) = self.acquire(one, 1).await.ok()?;
        let Ok((second, held_second)) = self.acquire(two, 1).await else {
            self.release(&first).await;
            return None;
        };
        let both = [&held_first, &held_second];
        if let Some(read) = self.read(&both, self.side.is_fenced).await {
            self.think(20, 0.02).await;
            let amount = self.random.random_range(-100..=100);
            self.write(&both, &[amount, -amount], Some(&read)).await;
        }
        self.release(&second).await;
        self.release(&first).await;
        Some(())
    }

    /// Waits in the queue, and writes as soon as it has the lease.
    pub(super) async fn wait_in_queue(&mut self) -> Option<()> {
        let resource = self.choose();
        let (lease, held) = self.acquire(resource, 2).await.ok()?;
        self.write(&[&held], &[1], None).await;
        self.release(&lease).await;
        Some(())
    }

    /// Writes with idempotency keys, and retries each write whose response was lost.
    pub(super) async fn repeat(&mut self) -> Option<()> {
        let resource = self.choose();
        let (lease, held) = self.acquire(resource, 1).await.ok()?;
        let side = self.side.clone();
        for _ in 0..self.random.random_range(1..20) {
            let writing = self.writing(&[&held], &[1], None);
            let attempts = self.write_until_answered(&held, &writing);
            let held = [&held];
            let answer = side.write(&held, &writing, TokenUse::Reusable, attempts);
            if answer.await != Answer::Done {
                break;
            }
        }
        self.release(&lease).await;
        Some(())
    }

    async fn write_until_answered(&mut self, held: &Held, writing: &Writing) -> Answer {
        let key = writing.entry.to_string();
        let mut last = Answer::Undone;
        loop {
            // Some attempts give up before the response arrives.
            let patience = match self.random.random_bool(0.2) {
                true => Duration::from_millis(self.random.random_range(1..10)),
                false => PATIENCE,
            };
            let held = [held];
            let request = self.try_write("/keyed", &held, writing, Some(&key));
            match timeout(patience, request).await.unwrap_or(Answer::Unknown) {
                // The layer returns the stored response of a key before it checks the token.
                // Therefore, a refusal means that no attempt has written.
                answer @ (Answer::Done | Answer::Refused) => return answer,
                Answer::Unknown => last = Answer::Unknown,
                Answer::Undone => {}
            }
            if *self.stop.borrow() {
                return last;
            }
            self.pause(Duration::from_millis(20)).await;
        }
    }

    /// Reads once, and then writes repeatedly: each state is computed from its own last write.
    pub(super) async fn stream(&mut self) -> Option<()> {
        let resource = self.choose();
        let (lease, held) = self.acquire(resource, 1).await.ok()?;
        let mut state = *self.read(&[&held], self.side.is_fenced).await?.first()?;
        let side = self.side.clone();
        let mut stream = Stream::new(self);
        while stream.goes_on(self).await {
            let writing = self.writing(&[&held], &[1], Some(&[state]));
            let held = [&held];
            let request = self.try_write("/again", &held, &writing, None);
            let answer = side.write(&held, &writing, TokenUse::Reusable, request);
            // A write without an answer may take effect later, so no other write may follow under
            // this token.
            if answer.await != Answer::Done {
                break;
            }
            state = state.with(writing.entry, 1);
        }
        self.release(&lease).await;
        Some(())
    }
}

/// The time for which a lease of two seconds is used.
const USED: Duration = Duration::from_millis(1_500);

/// The times at which a stream of writes ends and pauses. A stream continues after its pause, even
/// though another client may have written.
pub(super) struct Stream {
    until: Instant,
    pause_at: Option<Instant>,
}

impl Stream {
    pub(super) fn new(client: &mut Client) -> Self {
        let until = Instant::now() + USED;
        let pauses = client.random.random_bool(0.1);
        let pause_at = pauses.then(|| until - USED.mul_f64(client.random.random()));
        Self { until, pause_at }
    }

    pub(super) async fn goes_on(&mut self, client: &mut Client) -> bool {
        let pauses = self.pause_at.take_if(|at| *at < Instant::now());
        if pauses.is_some() {
            client.pause(PAUSE).await;
            self.until = Instant::now() + USED;
        }
        Instant::now() < self.until && !*client.stop.borrow()
    }
}
