//! A client that waits in the queue, and writes as soon as it has the lease.

use super::Client;

impl Client {
    pub(super) async fn wait_in_queue(&mut self) -> Option<()> {
        let resource = self.choose();
        let (lease, held) = self.acquire(resource, 2).await?;
        self.write(&[&held], &[1], None).await;
        self.release(&lease).await;
        Some(())
    }
}
