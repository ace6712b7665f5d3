//! Calls of the functions in the database.

use std::{error::Error, sync::Arc, time::Duration};

use super::{FOR_EVER, Line, Place, Postgres, sessions::PgConnectOptions, spawn};
use crate::{
    announce::LeaseDigest,
    lease::{
        Held, LeaseError, ListError, Page,
        backend::{Ask, Granted, Renewal, Reply, Waits},
    },
    model::sqlx,
    token::{Resource, Token},
};

/// A counterpart of the crate's trait with this name.
pub trait LeaseDatabase: Send + Sync + 'static {
    fn server(&self) -> &Postgres;

    fn session_options(&self) -> Option<PgConnectOptions> {
        Some(PgConnectOptions(self.server().clone()))
    }

    fn answer_wait(&self) -> Duration {
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
        let (in_line, listener) = match waits {
            Waits::No => (false, None),
            Waits::Yes {
                listener, queued, ..
            } => (*queued, listener.parse().ok()),
            Waits::Leaves => (true, None),
        };
        let (lease, ticket) = (ask.lease.clone(), ask.ticket);
        let ask = move |line: &mut Line| self::ask(line, lease, ticket, in_line, listener);
        Ok(self.run(ask).await)
    }

    pub async fn abandon(
        &self,
        _: &Resource,
        _: &LeaseDigest,
        ticket: i64,
    ) -> Result<Reply, LeaseError> {
        let abandon = move |line: &mut Line| {
            line.leave(ticket);
            let held = line.lease.as_ref();
            if held.is_some_and(|held| held.ticket == Some(ticket)) {
                line.lease = None;
            }
            line.tell_first();
        };
        self.run(abandon).await;
        Ok(Reply::Ended)
    }

    pub async fn end(&self, _: &Resource, lease: &LeaseDigest) -> Result<Reply, LeaseError> {
        let lease = lease.clone();
        let end = move |line: &mut Line| {
            let held = line.lease.take_if(|held| held.lease == lease);
            match held {
                Some(_) => {
                    line.tell_first();
                    Reply::Ended
                }
                None => Reply::Lost,
            }
        };
        Ok(self.run(end).await)
    }

    pub async fn break_lease(&self, _: &Resource, _: Option<Token>) -> Result<Reply, LeaseError> {
        // No scenario breaks a lease.
        Ok(Reply::Lost)
    }

    pub async fn call_first(&self, _: &Resource) -> Result<(), LeaseError> {
        Ok(self.run(Line::tell_first).await)
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
            let sweep = |line: &mut Line| {
                for one in line.line.clone() {
                    if line.pass_over(one.listener) {
                        line.tell_first();
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
        let inspect = |line: &mut Line| {
            line.lease.as_ref().map(|_| Held {
                token: Token::new(line.tokens).unwrap(),
                owner: None,
                ttl: FOR_EVER,
                waiters: line.line.len() as u64,
                granted_at: None,
            })
        };
        Ok(self.run(inspect).await)
    }

    /// Returns no free resources, because the waiters of the scenarios do not poll.
    pub async fn open(&self, _: &[String], _: i64) -> Result<Vec<String>, LeaseError> {
        Ok(vec![])
    }

    pub async fn list(&self, _: usize, _: Option<&str>) -> Result<Page, ListError> {
        Ok(Page::default())
    }

    async fn run<T: Send + 'static>(
        &self,
        statement: impl FnOnce(&mut Line) -> T + Send + 'static,
    ) -> T {
        self.database.server().run(statement).await
    }
}

fn ask(
    line: &mut Line,
    lease: LeaseDigest,
    ticket: i64,
    in_line: bool,
    listener: Option<i64>,
) -> (Reply, bool) {
    let in_line = in_line && line.is_waiting(ticket);
    let is_free = loop {
        match (&mut line.lease, line.line.front()) {
            (Some(held), _) if held.lease == lease => {
                held.ticket = held.ticket.filter(|held| *held == ticket);
                line.leave(ticket);
                return granted(line);
            }
            (Some(_), _) => break false,
            (None, Some(first)) if first.ticket != Some(ticket) && first.lease != lease => {
                let listener = first.listener;
                if !line.pass_over(listener) {
                    break false;
                }
                line.tell_first();
            }
            (None, _) => break true,
        }
    };
    if is_free {
        line.tokens += 1;
        line.lease = Some(Place {
            lease,
            ticket: Some(ticket),
            listener: 0,
        });
        line.leave(ticket);
        return granted(line);
    }
    let Some(listener) = listener else {
        line.leave(ticket);
        if in_line {
            line.tell_first();
        }
        return (Reply::Held { left: FOR_EVER }, false);
    };
    let mut places = line.line.iter_mut();
    match places.find(|one| one.ticket == Some(ticket)) {
        Some(place) => place.listener = listener,
        None => line.line.push_back(Place {
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

fn granted(line: &Line) -> (Reply, bool) {
    let token = Token::new(line.tokens).unwrap();
    let granted = Granted::new(token, FOR_EVER);
    (Reply::Granted(granted), !line.line.is_empty())
}
