//! A client that moves amounts between two resources, whose sum must not change.

use rand::RngExt;

use super::Client;

impl Client {
    pub(super) async fn transfer(&mut self) -> Option<()> {
        let resource = self.choose();
        // All clients use the same order, which prevents a deadlock.
        let (one, two) = (resource & !1, resource | 1);
        let (first, held_first) = self.acquire(one, 1).await?;
        let Some((second, held_second)) = self.acquire(two, 1).await else {
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
}
