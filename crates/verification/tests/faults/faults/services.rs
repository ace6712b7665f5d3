//! Faults of the services, and of the network to them.

use tokio::{join, time::sleep};

use super::{Stage, disturb, freeze};
use crate::{
    plan::{Fault, Planned},
    support::wall_clock::is_wrong,
};

impl Stage {
    pub(super) async fn at_service(&self, planned: Planned) -> bool {
        let Planned {
            fault,
            lasts,
            choice,
            ..
        } = planned;
        let n = choice % self.services.services.len();
        if fault == Fault::ServiceClockJumps {
            let jump = ["+1d", "-1d", "+30y", "-3s"][choice % 4];
            self.services.clock.jump_to(jump);
            let (time, ()) = join!(self.services.time(), sleep(lasts));
            self.services.clock.jump_to("+0");
            return is_wrong(time);
        }
        let mut service = self.services.services[n].lock().await;
        match fault {
            Fault::ServiceFrozen => freeze(|signal| service.signal(signal), lasts).await,
            Fault::ServiceKilled => {
                service.kill();
                sleep(lasts).await;
                service.start().await;
            }
            _ => disturb(&self.services.links[n], fault, lasts).await,
        }
        true
    }
}
