//! The requests of clients to the services.

use serde::Deserialize;
use tower_fence::{
    TokenUse,
    lease::{Acquire, Lease, LeaseError, Leases},
};

use super::{
    Client, TTL,
    record::{Held, operations},
};
use crate::{
    history::{Answer, Kind, State, now},
    service::Writing,
};

/// The members of a problem document that the clients use.
#[derive(Deserialize)]
struct Problem {
    #[serde(rename = "type")]
    type_: String,
}

/// Returns the name of a problem, or an empty string for any other document.
fn problem(body: &str) -> String {
    let problem = serde_json::from_str(body).map(|problem: Problem| problem.type_);
    let name = problem.unwrap_or_default();
    name.rsplit('#').next().unwrap_or_default().to_owned()
}

/// Returns the answer to a refused or lost request for a lease.
pub(super) fn not_granted(error: &LeaseError) -> Answer {
    match error {
        LeaseError::Held { .. } | LeaseError::TooManyWaiters { .. } => Answer::Undone,
        LeaseError::Unavailable(_) => Answer::Unknown,
        other => panic!("{other:?}"),
    }
}

impl Client {
    /// Acquires a lease that is not renewed. Waits in the queue for at most `wait` TTLs.
    pub(super) async fn acquire(
        &mut self,
        resource: usize,
        wait: u32,
    ) -> Result<(Lease, Held), Answer> {
        let service = self.choose_service();
        let (leases, name) = (&self.servers.leases[service], self.resource(resource));
        let request = async {
            let lease = leases
                .acquire(&name, Acquire::new(TTL).wait(TTL * wait))
                .await;
            let lease = lease.map_err(|error| not_granted(&error))?;
            let token = lease.fencing_token();
            Ok((lease, token))
        };
        self.side.grant(resource, request).await
    }

    pub(super) async fn release(&mut self, lease: &Lease) {
        let service = self.choose_service();
        let leases = &self.servers.leases[service];
        match leases.release(&lease.resource, &lease.id).await {
            Ok(()) | Err(LeaseError::Lost { .. } | LeaseError::Unavailable(_)) => {}
            Err(other) => panic!("{other:?}"),
        }
    }

    /// Reads with or without tokens.
    pub(super) async fn read(&mut self, held: &[&Held], with_tokens: bool) -> Option<Vec<State>> {
        let invoked = now();
        let url = self.url("", held);
        let mut request = self.servers.http.get(url);
        if with_tokens {
            request = request.header("Fencing-Token", field(held));
        }
        let answer = request.send().await.ok()?;
        let status = answer.status().as_u16();
        let body = answer.text().await.ok()?;
        let (answer, states) = match (status, problem(&body).as_str()) {
            (200, _) => (Answer::Done, serde_json::from_str(&body).unwrap()),
            (412, "stale-token") if with_tokens => {
                (Answer::Refused, vec![State::default(); held.len()])
            }
            (503, _) | (500, "transaction-aborted") => return None,
            _ => panic!("{status}: {body}"),
        };
        if with_tokens {
            let kinds = states.iter().map(|state| Kind::Read(*state));
            self.side.answered(operations(held, kinds, invoked), answer);
        }
        (answer == Answer::Done).then_some(states)
    }

    /// Writes with single-use tokens: either states computed from a read, or additions to the
    /// current states.
    pub(super) async fn write(&mut self, held: &[&Held], amounts: &[i64], read: Option<&[State]>) {
        let writing = self.writing(held, amounts, read);
        let side = self.side.clone();
        let request = self.try_write("", held, &writing, None);
        side.write(held, &writing, TokenUse::SingleUse, request)
            .await;
    }

    pub(super) fn writing(
        &self,
        held: &[&Held],
        amounts: &[i64],
        read: Option<&[State]>,
    ) -> Writing {
        let entry = self.new_entry();
        let back = read.map(|read| {
            let new = read
                .iter()
                .zip(amounts)
                .map(|(state, amount)| state.with(entry, *amount));
            new.collect()
        });
        Writing {
            entry,
            tokens: held.iter().map(|held| held.token.token.get()).collect(),
            amounts: amounts.to_vec(),
            back,
        }
    }

    /// Sends one request without recording it.
    pub(super) async fn try_write(
        &mut self,
        path: &str,
        held: &[&Held],
        writing: &Writing,
        key: Option<&str>,
    ) -> Answer {
        let url = self.url(path, held);
        let mut request = self.servers.http.post(url).json(writing);
        if self.side.is_fenced {
            request = request.header("Fencing-Token", field(held));
        }
        if let Some(key) = key {
            request = request.header("Idempotency-Key", format!("\"{key}\""));
        }
        let Ok(answer) = request.send().await else {
            return Answer::Unknown;
        };
        let status = answer.status().as_u16();
        let Ok(body) = answer.text().await else {
            return if status == 200 {
                Answer::Done
            } else {
                Answer::Unknown
            };
        };
        match (status, problem(&body).as_str()) {
            (200, _) => Answer::Done,
            (412, "stale-token") => Answer::Refused,
            (503, "fence-busy" | "store-unavailable" | "handler-timeout")
            | (500, "transaction-aborted" | "response-not-stored") => Answer::Undone,
            (503, "outcome-unknown") | (409, "idempotency-in-flight") => Answer::Unknown,
            // Without the fence, a 503 does not show whether the write was committed.
            (503, "") if !self.side.is_fenced => Answer::Unknown,
            _ => panic!("{status}: {body} {writing:?}"),
        }
    }

    fn url(&mut self, path: &str, held: &[&Held]) -> String {
        let names = held.iter().map(|held| &*self.side.names[held.resource]);
        let names = names.collect::<Vec<_>>().join("/");
        let service = self.choose_service();
        let service = &self.servers.settings.urls[service];
        format!("{service}{path}/{}/{names}", self.side.tables.side)
    }
}

fn field(held: &[&Held]) -> String {
    let members = held.iter().map(|held| held.token.to_string());
    members.collect::<Vec<_>>().join(", ")
}
