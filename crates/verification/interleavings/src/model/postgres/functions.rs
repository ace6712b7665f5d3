//! Calls of the functions in the database.

use std::{error::Error, pin::Pin, sync::Arc, time::Duration};

use super::{FOR_EVER, Place, Postgres, State, sessions::PgConnectOptions, spawn};
use crate::{
    announce::LeaseDigest,
    lease::{
        Held, LeaseError, Page,
        backend::{Ask, End, Granted, Renewal, Reply, Waits},
    },
    model::{held, sqlx},
    token::{Resource, Token},
};

/// A counterpart of the crate's trait with this name.
pub trait LeaseDatabase: Send + Sync + 'static {
    fn server(&self) -> &Postgres;

    fn session_options(&self) -> Option<PgConnectOptions> {
        Some(PgConnectOptions(self.server().clone()))
    }

    fn closed(&self) -> Pin<Box<dyn Future<Output = ()> + Send>> {
        Box::pin(std::future::pending())
    }

    fn answer_timeout(&self) -> Duration {
        Duration::from_millis(50)
    }
}

impl LeaseDatabase for Postgres {
    fn server(&self) -> &Postgres {
        self
    }
}

#[derive(Clone)]
pub struct Functions {
    pub database: Arc<dyn LeaseDatabase>,
}

impl Functions {
    pub async fn ask(
        &self,
        _: &Resource,
        ask: &Ask,
        waits: &Waits,
    ) -> Result<(Reply, bool), LeaseError> {
        let (in_queue, listener) = match waits {
            Waits::No => (false, None),
            Waits::Yes {
                listener, queued, ..
            } => (*queued, Some(*listener)),
            Waits::Leaves => (true, None),
        };
        let (lease, ticket) = (ask.lease.clone(), ask.ticket);
        let ask = move |state: &mut State| self::ask(state, lease, ticket, in_queue, listener);
        Ok(self.run(ask).await)
    }

    pub async fn end(&self, _: &Resource, end: &End) -> Result<Reply, LeaseError> {
        let end = end.clone();
        let end = move |state: &mut State| {
            let is_it = |held: &mut Place| match &end {
                End::Release(lease) => held.lease == *lease,
                End::Abandon { ticket, .. } => held.ticket == Some(*ticket),
                // No scenario breaks a lease.
                End::Break(_) => false,
            };
            if let End::Abandon { ticket, .. } = &end {
                state.leave(*ticket);
            }
            let has_ended = state.lease.take_if(is_it).is_some();
            if has_ended || matches!(end, End::Abandon { .. }) {
                state.notify_first();
            }
            match has_ended {
                true => Reply::Ended,
                false => Reply::Lost,
            }
        };
        Ok(self.run(end).await)
    }

    pub async fn call_first(&self, _: &Resource) -> Result<(), LeaseError> {
        Ok(self.run(State::notify_first).await)
    }

    pub async fn prefix(&self) -> Result<String, LeaseError> {
        Ok("tower_fence.".into())
    }

    pub fn not_registered(error: sqlx::Error) -> LeaseError {
        LeaseError::unavailable(error)
    }

    pub fn sweep_in_background(&self) {
        let functions = self.clone();
        spawn(async move {
            let sweep = |state: &mut State| {
                for one in state.queue.clone() {
                    if state.pass_over(one.listener) {
                        state.notify_first();
                    }
                }
            };
            functions.run(sweep).await;
        });
    }

    pub async fn renew(&self, _: &Resource, _: &Renewal) -> Result<Reply, LeaseError> {
        Ok(Reply::Lost)
    }

    pub async fn inspect(&self, _: &Resource) -> Result<Option<Held>, LeaseError> {
        let inspect = |state: &mut State| {
            let lease = state.lease.as_ref();
            lease.map(|_| held(state.tokens, state.queue.len()))
        };
        Ok(self.run(inspect).await)
    }

    /// Returns no free resources, because the waiters of the scenarios do not poll.
    pub async fn open(&self, _: &[String], _: i64) -> Result<Vec<String>, LeaseError> {
        Ok(vec![])
    }

    pub async fn list(&self, _: usize, _: Option<&str>) -> Result<Page, LeaseError> {
        Ok(Page::default())
    }

    async fn run<T: Send + 'static>(
        &self,
        statement: impl FnOnce(&mut State) -> T + Send + 'static,
    ) -> T {
        self.database.server().run(statement).await
    }
}

fn ask(
    state: &mut State,
    lease: LeaseDigest,
    ticket: i64,
    in_queue: bool,
    listener: Option<i64>,
) -> (Reply, bool) {
    let in_queue = in_queue && state.is_waiting(ticket);
    let is_free = loop {
        match (&mut state.lease, state.queue.front()) {
            (Some(held), _) if held.lease == lease => {
                held.ticket = held.ticket.filter(|held| *held == ticket);
                state.leave(ticket);
                return granted(state);
            }
            (Some(_), _) => break false,
            (None, Some(first)) if first.ticket != Some(ticket) && first.lease != lease => {
                let listener = first.listener;
                if !state.pass_over(listener) {
                    break false;
                }
                state.notify_first();
            }
            (None, _) => break true,
        }
    };
    if is_free {
        state.tokens += 1;
        state.lease = Some(Place {
            lease,
            ticket: Some(ticket),
            listener: 0,
        });
        state.leave(ticket);
        return granted(state);
    }
    let Some(listener) = listener else {
        state.leave(ticket);
        if in_queue {
            state.notify_first();
        }
        return (Reply::Held { left: FOR_EVER }, false);
    };
    let mut places = state.queue.iter_mut();
    match places.find(|one| one.ticket == Some(ticket)) {
        Some(place) => place.listener = listener,
        None => state.queue.push_back(Place {
            lease,
            ticket: Some(ticket),
            listener,
        }),
    }
    let left = FOR_EVER;
    (
        Reply::Queued {
            left,
            joined: false,
        },
        false,
    )
}

fn granted(state: &State) -> (Reply, bool) {
    let token = Token::new(state.tokens).unwrap();
    let granted = Granted::new(token, FOR_EVER);
    (Reply::Granted(granted), !state.queue.is_empty())
}
