//! Faults of the services, and of the network to them.

use tokio::{join, time::sleep};

use super::{Stage, disturb, slow_down};
use crate::{
    clients::TTL,
    plan::{Fault, Planned},
    support::{proxy::Link, wall_clock::is_wrong},
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
        let link = &self.services.links[n];
        if fault == Fault::ServiceClockJumps {
            let jump = ["+1d", "-1d", "+30y", "-3s"][choice % 4];
            self.services.clock.jump_to(jump);
            let (time, ()) = join!(self.services.time(), sleep(lasts));
            self.services.clock.jump_to("+0");
            return is_wrong(time);
        }
        let mut service = self.services.services[n].lock().await;
        match fault {
            Fault::ServiceFrozen => {
                service.signal("-STOP");
                sleep(lasts).await;
                service.signal("-CONT");
            }
            Fault::ServiceKilled => {
                service.kill();
                sleep(lasts).await;
                service.start().await;
            }
            Fault::ServiceCutOff => disturb(link, Link::Cut, lasts).await,
            Fault::ServiceSilent => disturb(link, Link::Silent, TTL / 2 + lasts).await,
            Fault::ServiceSlow => slow_down(link, lasts).await,
            _ => disturb(link, Link::NoAnswer, lasts).await,
        }
        true
    }
}
