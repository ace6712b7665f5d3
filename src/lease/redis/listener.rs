//! The connection on which an issuer hears of grants: one for all lines, as long as there are any.

use std::{collections::BTreeSet, sync::Weak, time::Duration};

use futures_util::{StreamExt, stream::FuturesUnordered};
use redis::{Msg, PushInfo, PushKind, RedisResult};
use tokio::{
    sync::{mpsc, oneshot, watch},
    time::{Instant, sleep, sleep_until},
};

use super::{connection::Ear, line::Lines};

/// How often to make sure that the connection still hears, while somebody waits.
const HEARTBEAT: Duration = Duration::from_secs(2);

/// A partition to listen to, and who waits for that.
pub(super) type Subscription = (u8, oneshot::Sender<RedisResult<()>>);

/// Listens on one connection for all lines, and connects again when it is lost. Nobody listens to
/// any partition then, until a waiter that was called asks for that.
pub(super) async fn listen(lines: Weak<Lines>, mut wanted: mpsc::UnboundedReceiver<Subscription>) {
    // Without a waiter there is no connection.
    while let Some(first) = wanted.recv().await {
        let Some(connecting) = lines.upgrade() else {
            return;
        };
        let server = connecting.scripts().server();
        let mut changes = server.changes();
        let (heard, pushes) = mpsc::unbounded_channel();
        let ear = match server.listen(heard).await {
            Ok(ear) => ear,
            Err(error) => {
                // Those that asked meanwhile fail with the first one.
                let _ = first.1.send(Err(error.clone()));
                while let Ok((_, done)) = wanted.try_recv() {
                    let _ = done.send(Err(error.clone()));
                }
                continue;
            }
        };
        drop(connecting);
        hear(ear, pushes, &lines, &mut wanted, &mut changes, first).await;
        // Whoever waits asks again: for its place, or for an error.
        let Some(lines) = lines.upgrade() else {
            return;
        };
        lines.call_all(None);
        sleep(Duration::from_millis(10)).await;
    }
}

/// Hands on what is published, until the connection is lost or leads to the wrong server.
async fn hear(
    ear: Ear,
    mut pushes: mpsc::UnboundedReceiver<PushInfo>,
    lines: &Weak<Lines>,
    wanted: &mut mpsc::UnboundedReceiver<Subscription>,
    changes: &mut watch::Receiver<u64>,
    first: Subscription,
) {
    let mut partitions = BTreeSet::new();
    // Beside what is heard meanwhile: a server of a cluster may be silent, while others go on.
    let mut subscribing = FuturesUnordered::new();
    subscribing.push(subscribe(&ear, lines, first.0, Some(first.1)));
    let mut next_beat = Instant::now() + HEARTBEAT;
    loop {
        tokio::select! {
            subscription = wanted.recv() => {
                let Some((partition, done)) = subscription else {
                    return;
                };
                if partitions.contains(&partition) {
                    let _ = done.send(Ok(()));
                } else {
                    subscribing.push(subscribe(&ear, lines, partition, Some(done)));
                }
            }
            Some((partition, done, heard)) = subscribing.next() => {
                if heard.is_ok() {
                    partitions.insert(partition);
                } else if partitions.remove(&partition) {
                    if !ear.has_many_servers() {
                        return;
                    }
                    // Its waiters ask again; to the others that does no harm.
                    if let Some(lines) = lines.upgrade() {
                        lines.call_all(None);
                    }
                }
                if let Some(done) = done {
                    let _ = done.send(heard);
                }
            }
            push = pushes.recv() => {
                let (Some(push), Some(lines)) = (push, lines.upgrade()) else {
                    return;
                };
                // A slot has moved, or a connection was lost.
                if matches!(push.kind, PushKind::Disconnection | PushKind::SUnsubscribe) {
                    return;
                }
                if let Some(message) = Msg::from_push_info(push)
                    && let Ok(payload) = message.get_payload::<String>()
                {
                    lines.published(message.get_channel_name(), &payload);
                }
            }
            _ = changes.changed() => return,
            () = sleep_until(next_beat) => {
                let waits = lines.upgrade().map(|lines| !lines.is_empty());
                let Some(waits) = waits else {
                    return;
                };
                // Subscribing again changes nothing, and is answered.
                if waits && subscribing.is_empty() {
                    let again = partitions.iter();
                    subscribing.extend(again.map(|one| subscribe(&ear, lines, *one, None)));
                }
                next_beat = Instant::now() + HEARTBEAT;
            }
        }
    }
}

/// Subscribes to a partition, or makes sure that this was done and holds.
async fn subscribe(
    ear: &Ear,
    lines: &Weak<Lines>,
    partition: u8,
    done: Option<oneshot::Sender<RedisResult<()>>>,
) -> (
    u8,
    Option<oneshot::Sender<RedisResult<()>>>,
    RedisResult<()>,
) {
    let heard = match lines.upgrade() {
        Some(lines) => {
            let channels = [lines.channel(partition), lines.everybody(partition)];
            lines.scripts().server().subscribe(ear, channels).await
        }
        None => Ok(()),
    };
    (partition, done, heard)
}
