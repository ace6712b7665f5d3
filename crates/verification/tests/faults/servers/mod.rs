//! The servers of a run: Postgres, PgBouncer, the servers of the lease store, and three services.
//! Faults freeze, kill and replace them.

pub mod database;
pub mod leases;
pub mod services;

use std::time::Duration;

use tokio::{join, time::sleep};

use crate::{
    clients::TTL,
    plan::{Fault, Planned},
    support::{
        proxy::{Link, Proxy},
        wall_clock::{WallClock, is_wrong},
    },
};

/// Freezes a process for a while.
pub async fn freeze(signal: impl Fn(&str), lasts: Duration) {
    signal("-STOP");
    sleep(lasts).await;
    signal("-CONT");
}

/// Sets a wrong wall clock for a while. Returns whether the time that is read during it is wrong.
async fn jumps(
    clock: &WallClock,
    offset: &str,
    time: impl Future<Output = Option<i64>>,
    lasts: Duration,
) -> bool {
    clock.jump_to(offset);
    let (time, ()) = join!(time, sleep(lasts));
    clock.jump_to("+0");
    is_wrong(time)
}

/// Disturbs the network to a service, to a node or to Postgres for a while.
pub async fn disturb(link: &Proxy, planned: Planned) {
    use Fault::*;
    let (state, lasts) = match planned.fault {
        ServiceSlow | PostgresSlow | NodeSlow => {
            // Each message is delayed.
            link.slow_down(Duration::from_millis(20));
            sleep(planned.lasts).await;
            return link.slow_down(Duration::ZERO);
        }
        ServiceCutOff | PostgresCutOff | NodeCutOff => (Link::Cut, planned.lasts),
        ServiceSilent | PostgresSilent | NodeSilent => (Link::Silent, TTL / 2 + planned.lasts),
        ServiceWithoutAnswer | PostgresWithoutAnswer | NodeWithoutAnswer => {
            (Link::NoAnswer, planned.lasts)
        }
        other => unreachable!("{other:?} is not a fault of a link"),
    };
    link.set(state);
    sleep(lasts).await;
    link.set(Link::Whole);
}
