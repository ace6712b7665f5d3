//! Faults of clients.

use tokio::time::sleep;

use super::Stage;
use crate::{
    clients::TTL,
    plan::{Fault, Planned},
};

impl Stage {
    pub(super) async fn at_clients(&self, planned: Planned) -> bool {
        let mut clients = self.clients.lock().await;
        if planned.fault == Fault::ClientsKilled {
            clients.replace();
            return true;
        }
        clients.signal("-STOP");
        // Some of their leases expire during the pause.
        sleep(TTL / 2 + planned.lasts).await;
        clients.signal("-CONT");
        true
    }
}
