//! A client that reads, pauses, and writes back, under a lease that is renewed.

use rand::RngExt;
use tower_fence::client::{AcquireError, Holder};

use super::{Client, TTL};
use crate::history::now;

impl Client {
    pub(super) async fn count(&mut self) -> Option<()> {
        let (resource, service) = (self.choose(), self.choose_service());
        let invoked = now();
        let holder = Holder::new(self.servers.leases[service].clone())
            .ttl(TTL)
            .wait(TTL);
        self.asks_for_lease(resource, invoked);
        let guard = match holder.acquire(&self.side.names[resource]).await {
            Ok(guard) => guard,
            Err(AcquireError::Lease(error)) => {
                return self.without_lease(resource, invoked, &error);
            }
            Err(error) => panic!("{error:?}"),
        };
        let field = guard.fencing_token();
        let held = self.granted(resource, field.token.get(), field.to_string(), invoked);
        // Grants are announced, so a read after the grant needs no token.
        let with_tokens = self.side.is_fenced && self.random.random_bool(0.5);
        let read = self.read(&[&held], with_tokens).await?;
        self.think(20, 0.01).await;
        self.write(&[&held], &[1], Some(&read)).await;
        let _ = guard.release().await;
        Some(())
    }
}
