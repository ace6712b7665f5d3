//! A client that adds to a set under a lease that is not renewed. It sometimes pauses for longer
//! than the lease lasts.

use rand::RngExt;

use super::Client;

impl Client {
    pub(super) async fn add_to_set(&mut self) -> Option<()> {
        let resource = self.choose();
        let (lease, held) = self.acquire(resource, 1).await?;
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
}
