//! A model of `redis` for the queue of waiters, with a simplified implementation of each script in
//! its server.
//!
//! The leases of the model do not expire. The scheduler may delay a published message for any time.
//! A connection may be cut, and then loses the messages that it has not received yet.

use std::{
    collections::{BTreeSet, VecDeque},
    io,
    sync::{Arc, Mutex},
};

use ::redis::Value;

use super::{pause, step, sync::mpsc};

pub use ::redis::{ErrorKind, Msg, PushInfo, PushKind, RedisError, RedisResult};

/// A waiter or a holder.
#[derive(Clone, Debug)]
pub struct Asked {
    pub id: String,
    pub ticket: i64,
    pub channel: String,
}

#[derive(Default)]
pub struct State {
    pub lease: Option<Asked>,
    pub queue: VecDeque<Asked>,
    pub tokens: i64,
    connections: u64,
    listeners: Vec<Listening>,
}

struct Listening {
    connection: u64,
    channels: BTreeSet<String>,
    pushes: mpsc::UnboundedSender<PushInfo>,
}

/// The server. Clones refer to the same server.
#[derive(Clone, Default)]
pub struct Redis(Arc<Mutex<State>>);

impl Redis {
    /// Runs a script. The caller may be dropped before or after the script runs.
    pub async fn run<T>(&self, script: impl FnOnce(&mut State) -> T) -> T {
        pause().await;
        let answer = script(&mut self.0.lock().unwrap());
        pause().await;
        answer
    }

    /// Opens a connection that may listen.
    pub async fn connect(&self, pushes: mpsc::UnboundedSender<PushInfo>) -> u64 {
        self.run(|state| {
            state.connections += 1;
            let connection = state.connections;
            state.listeners.push(Listening {
                connection,
                channels: BTreeSet::new(),
                pushes,
            });
            connection
        })
        .await
    }

    pub async fn subscribe(&self, connection: u64, channels: &[String]) -> RedisResult<()> {
        self.run(|state| {
            let mut listeners = state.listeners.iter_mut();
            let listener = listeners.find(|listener| listener.connection == connection);
            let listener = listener.ok_or(io::Error::from(io::ErrorKind::BrokenPipe))?;
            listener.channels.extend(channels.iter().cloned());
            Ok(())
        })
        .await
    }

    pub fn disconnect(&self, connection: u64) {
        step();
        let mut state = self.0.lock().unwrap();
        let is_other = |listener: &Listening| listener.connection != connection;
        state.listeners.retain(is_other);
    }

    /// Cuts all listening connections.
    pub fn cut(&self) {
        step();
        let cut = std::mem::take(&mut self.0.lock().unwrap().listeners);
        for listener in cut {
            let _ = listener.pushes.send(PushInfo {
                kind: PushKind::Disconnection,
                data: vec![],
            });
        }
    }
}

impl State {
    pub fn is_waiting(&self, id: &str) -> bool {
        self.queue.iter().any(|one| one.id == id)
    }

    pub fn leave(&mut self, id: &str) {
        self.queue.retain(|one| one.id != id);
    }

    /// Removes the lease, and grants the resource to the first waiter whose issuer listens.
    pub fn end(&mut self) {
        self.lease = None;
        while let Some(first) = self.queue.pop_front() {
            if self.publish(&first.channel, &format!("{} the-lease", first.ticket)) > 0 {
                self.tokens += 1;
                self.lease = Some(first);
                return;
            }
        }
    }

    /// Publishes a message. Returns the number of connections that listen on the channel.
    fn publish(&self, channel: &str, message: &str) -> usize {
        let listening = |listener: &&Listening| listener.channels.contains(channel);
        let listeners: Vec<_> = self.listeners.iter().filter(listening).collect();
        for listener in &listeners {
            let _ = listener.pushes.send_at_once(PushInfo {
                kind: PushKind::Message,
                data: [channel, message]
                    .map(|text| Value::BulkString(text.into()))
                    .into(),
            });
        }
        listeners.len()
    }
}
