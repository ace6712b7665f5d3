//! The connection on which an issuer hears of grants: one for all lines, as long as there are any.

use std::{collections::BTreeSet, sync::Weak, time::Duration};

use futures_util::future::try_join_all;
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
    let mut first = Some(first);
    let mut next_beat = Instant::now() + HEARTBEAT;
    loop {
        let subscription = match first.take() {
            Some(subscription) => Some(subscription),
            None => tokio::select! {
                subscription = wanted.recv() => subscription,
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
                    continue;
                }
                _ = changes.changed() => return,
                () = sleep_until(next_beat) => {
                    let Some(lines) = lines.upgrade() else {
                        return;
                    };
                    if !lines.is_empty() && hears(&ear, &lines, &partitions).await.is_err() {
                        return;
                    }
                    next_beat = Instant::now() + HEARTBEAT;
                    continue;
                }
            },
        };
        let (Some((partition, done)), Some(lines)) = (subscription, lines.upgrade()) else {
            return;
        };
        if partitions.contains(&partition) {
            let _ = done.send(Ok(()));
            continue;
        }
        // One that fails is no reason to leave the others: in a cluster they are elsewhere.
        let heard = hears(&ear, &lines, &[partition].into()).await;
        if heard.is_ok() {
            partitions.insert(partition);
        }
        let _ = done.send(heard);
    }
}

/// Subscribes to partitions, or makes sure that this was done and holds.
async fn hears(ear: &Ear, lines: &Lines, partitions: &BTreeSet<u8>) -> RedisResult<()> {
    let server = lines.scripts().server();
    let channels = |partition: &u8| [lines.channel(*partition), lines.everybody(*partition)];
    let subscribing = partitions
        .iter()
        .map(|partition| server.subscribe(ear, channels(partition)));
    try_join_all(subscribing).await.map(drop)
}
