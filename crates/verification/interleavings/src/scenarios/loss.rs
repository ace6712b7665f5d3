//! The loss of a lease. Each task that watches the lease is notified of the same loss, which is
//! counted once.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use http::HeaderName;

use super::{FOR_EVER, all, by_chance, resource, some_ms, tasks};
use crate::{
    client::{
        held_lease::{Bounds, HeldLease},
        loss::Loss,
    },
    lease::{Lease, LeaseId},
    metrics,
    model::clock::{Instant, sleep},
    token::Token,
};

fn lease(ttl: Duration) -> Lease {
    Lease {
        resource: resource(),
        id: LeaseId::random(),
        token: Token::new(7).unwrap(),
        ttl,
        signed: None,
    }
}

/// During renewals, the lease expires, or a renewal is refused and the holder releases the lease.
pub async fn all_watchers_report_the_same_loss() {
    metrics::HELD.set(0.0);
    metrics::COUNTED.set(0);
    let ends_by_time = by_chance();
    let ttl = if ends_by_time {
        Duration::from_millis(5)
    } else {
        FOR_EVER
    };
    let header = HeaderName::from_static("fencing-token");
    let held = Arc::new(HeldLease::new(
        &lease(ttl),
        Instant::now(),
        header,
        Bounds::default(),
    ));
    let losses = Arc::<Mutex<Vec<String>>>::default();
    let all_tasks = tasks(6, |n| {
        let (held, losses) = (held.clone(), losses.clone());
        async move {
            let resource = held.resource.clone();
            let loss = match n {
                0 | 1 => held.clone().wait_for_loss().await,
                2 => {
                    // This task may begin to watch the lease after the loss.
                    sleep(some_ms([0, 1, 5])).await;
                    let before = held.lost();
                    let loss = held.clone().wait_for_loss().await;
                    assert!(before.is_none_or(|before| before.to_string() == loss.to_string()));
                    loss
                }
                3 => {
                    for _ in 0..2 {
                        held.renewed(&lease(ttl), Instant::now());
                        sleep(some_ms([0, 1])).await;
                    }
                    return;
                }
                4 if ends_by_time => match held.lost() {
                    Some(loss) => loss,
                    None => return,
                },
                4 => held.lose(Loss::Refused { resource }),
                _ if ends_by_time => held.clone().wait_for_loss().await,
                _ => held.lose(Loss::GivenUp { resource }),
            };
            losses.lock().unwrap().push(loss.to_string());
            assert!(held.lost().is_some(), "a lost lease is held again");
        }
    });
    all(all_tasks).await;
    let losses = losses.lock().unwrap();
    assert!(losses.iter().all(|loss| *loss == losses[0]), "{losses:?}");
    assert_eq!(metrics::HELD.get(), 0.0, "the loss is counted once");
    assert!(metrics::COUNTED.get() <= 1);
}
