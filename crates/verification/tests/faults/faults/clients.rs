//! Faults of clients.

use super::{Stage, freeze};
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
        // Some of their leases expire during the pause.
        freeze(|signal| clients.signal(signal), TTL / 2 + planned.lasts).await;
        true
    }
}
