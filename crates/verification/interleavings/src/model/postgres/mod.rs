//! A model of Postgres for the queue of waiters: sessions that listen, and a server with a
//! simplified implementation of each function.
//!
//! The leases of the model do not expire. A statement continues after its caller was dropped. The
//! scheduler may delay a notification for any time. A session may be cut, and then loses the
//! notifications that it has not received yet.

pub mod functions;
pub mod sessions;

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{Arc, Mutex},
};

use shuttle::rand::{Rng, thread_rng};

use super::{
    FOR_EVER, pause,
    runtime::{Handle, spawn},
    step,
    sync::mpsc,
};
use crate::announce::LeaseDigest;

/// A waiter or a holder.
#[derive(Clone, Debug)]
pub struct Place {
    pub lease: LeaseDigest,
    /// The ticket; `None` for a holder that has sent several requests.
    pub ticket: Option<i64>,
    pub listener: i64,
}

#[derive(Default)]
pub struct State {
    pub lease: Option<Place>,
    pub queue: VecDeque<Place>,
    pub tokens: i64,
    begun: u64,
    sessions: BTreeMap<u64, Session>,
}

#[derive(Debug)]
struct Session {
    listener: Option<i64>,
    channel: Option<String>,
    notified: mpsc::UnboundedSender<String>,
}

/// The server. Clones refer to the same server.
#[derive(Clone, Default)]
pub struct Postgres(Arc<Mutex<State>>);

impl Postgres {
    /// Executes a statement completely, even if its caller is dropped.
    pub async fn run<T: Send + 'static>(
        &self,
        statement: impl FnOnce(&mut State) -> T + Send + 'static,
    ) -> T {
        let server = self.clone();
        let run = Handle::first().spawn(async move {
            pause().await;
            let answer = statement(&mut server.0.lock().unwrap());
            pause().await;
            answer
        });
        run.await.unwrap()
    }

    /// Cuts each listening session with a probability of one half.
    pub fn cut(&self) {
        step();
        let mut state = self.0.lock().unwrap();
        state.sessions.retain(|_, _| thread_rng().gen_bool(0.5));
    }

    fn end(&self, session: u64) {
        step();
        self.0.lock().unwrap().sessions.remove(&session);
    }
}

impl State {
    pub fn is_waiting(&self, ticket: i64) -> bool {
        self.queue.iter().any(|one| one.ticket == Some(ticket))
    }

    pub fn leave(&mut self, ticket: i64) {
        self.queue.retain(|one| one.ticket != Some(ticket));
    }

    /// Removes the waiters of a listener that no longer listens, and returns true in this case.
    pub fn pass_over(&mut self, listener: i64) -> bool {
        let mut sessions = self.sessions.values();
        if sessions.any(|session| session.listener == Some(listener)) {
            return false;
        }
        self.queue.retain(|one| one.listener != listener);
        true
    }

    /// Notifies the first waiter whose process runs. The notification contains the time for which
    /// the resource stays blocked.
    pub fn notify_first(&mut self) {
        while let Some(first) = self.queue.front().cloned() {
            if self.pass_over(first.listener) {
                continue;
            }
            let held = self.lease.as_ref();
            let closed = match held.is_some_and(|held| held.lease != first.lease) {
                true => FOR_EVER.as_millis(),
                false => 0,
            };
            let message = format!("{} {closed}", first.ticket.unwrap());
            let channel = format!("tower_fence_{:x}", first.listener);
            for session in self.sessions.values() {
                if session.channel.as_ref() == Some(&channel) {
                    let _ = session.notified.send_at_once(message.clone());
                }
            }
            return;
        }
    }
}
