//! The connection on which an issuer hears of grants: one for all lines, as long as there are any.

use std::{collections::BTreeSet, sync::Weak, time::Duration};

use futures_util::StreamExt;
use redis::aio::PubSub;
use tokio::{
    sync::{mpsc, oneshot, watch},
    time::{Instant, sleep, sleep_until, timeout},
};

use super::line::Lines;

/// How often to make sure that the connection still hears, while somebody waits.
const HEARTBEAT: Duration = Duration::from_secs(2);

/// A partition to listen to, and who waits for that.
pub(super) type Subscription = (u8, oneshot::Sender<()>);

/// Listens on one connection for all lines, and connects again when it is lost.
pub(super) async fn listen(lines: Weak<Lines>, mut wanted: mpsc::UnboundedReceiver<Subscription>) {
    let mut partitions = BTreeSet::new();
    let mut first: Option<Subscription> = None;
    loop {
        // Before the first waiter there is no connection.
        if partitions.is_empty() && first.is_none() {
            first = wanted.recv().await;
            if first.is_none() {
                return;
            }
        }
        let Some(connecting) = lines.upgrade() else {
            return;
        };
        let mut changes = connecting.scripts().server().changes();
        let connected = connect(&connecting, &partitions).await;
        // Whoever waits asks again: for its place, or for an error.
        connecting.call_all(None);
        drop(connecting);
        match connected {
            Some(pubsub) => {
                let over = hear(
                    pubsub,
                    &lines,
                    &mut wanted,
                    &mut changes,
                    &mut partitions,
                    first.take(),
                );
                if over.await {
                    return;
                }
                sleep(Duration::from_millis(10)).await;
            }
            None => {
                first = None;
                while wanted.try_recv().is_ok() {}
                sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

/// Hands on what is published, until the connection is lost or leads to the wrong server; true
/// when nobody needs it any more.
async fn hear(
    pubsub: PubSub,
    lines: &Weak<Lines>,
    wanted: &mut mpsc::UnboundedReceiver<Subscription>,
    changes: &mut watch::Receiver<u64>,
    partitions: &mut BTreeSet<u8>,
    mut first: Option<Subscription>,
) -> bool {
    let (mut sink, mut messages) = pubsub.split();
    let mut next_beat = Instant::now() + HEARTBEAT;
    loop {
        let subscription = match first.take() {
            Some(subscription) => Some(subscription),
            None => tokio::select! {
                subscription = wanted.recv() => subscription,
                message = messages.next() => {
                    let (Some(message), Some(lines)) = (message, lines.upgrade()) else {
                        return false;
                    };
                    next_beat = Instant::now() + HEARTBEAT;
                    if let Ok(payload) = message.get_payload::<String>() {
                        lines.published(message.get_channel_name(), &payload);
                    }
                    continue;
                }
                _ = changes.changed() => return false,
                () = sleep_until(next_beat) => {
                    let Some(lines) = lines.upgrade() else {
                        return true;
                    };
                    // Subscribing again changes nothing, and is answered.
                    let heard = sink.subscribe(lines.channel());
                    let within = lines.scripts().server().command_wait();
                    let waits = !lines.is_empty();
                    if waits && !matches!(timeout(within, heard).await, Ok(Ok(()))) {
                        return false;
                    }
                    next_beat = Instant::now() + HEARTBEAT;
                    continue;
                }
            },
        };
        let Some((partition, done)) = subscription else {
            return true;
        };
        if !partitions.contains(&partition) {
            let Some(lines) = lines.upgrade() else {
                return true;
            };
            let subscribing = sink.subscribe(lines.scripts().everybody(partition));
            let within = lines.scripts().server().command_wait();
            if !matches!(timeout(within, subscribing).await, Ok(Ok(()))) {
                return false;
            }
            partitions.insert(partition);
        }
        let _ = done.send(());
    }
}

/// A connection that listens on this issuer's channel and to these partitions.
async fn connect(lines: &Lines, partitions: &BTreeSet<u8>) -> Option<PubSub> {
    let server = lines.scripts().server();
    let connect = async {
        let mut pubsub = server.client().await?.get_async_pubsub().await?;
        let everybody = partitions
            .iter()
            .map(|partition| lines.scripts().everybody(*partition));
        let channels: Vec<String> = everybody.chain([lines.channel().to_owned()]).collect();
        pubsub.subscribe(&channels[..]).await?;
        Ok::<_, redis::RedisError>(pubsub)
    };
    match timeout(server.command_wait(), connect).await {
        Ok(Ok(pubsub)) => Some(pubsub),
        Ok(Err(error)) => {
            server.failed(&error).await;
            None
        }
        Err(_) => None,
    }
}
