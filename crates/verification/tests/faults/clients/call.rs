//! The requests of clients to the services, and their recording.

use std::sync::atomic::Ordering::Relaxed;

use serde::Deserialize;
use tower_fence::{
    TokenUse,
    lease::{Acquire, Lease, LeaseError, Leases},
};

use super::{Client, TTL};
use crate::{
    history::{Answer, Kind, Moment, Operation, State, now},
    service::Writing,
};

/// A held lease: the number of its resource, its token, and its member of the header
/// `Fencing-Token`.
#[derive(Clone, Debug)]
pub struct Held {
    pub resource: usize,
    pub token: i64,
    pub field: String,
}

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

impl Client {
    /// Acquires a lease that is not renewed. Waits in the queue for at most `wait` TTLs.
    pub(super) async fn acquire(&mut self, resource: usize, wait: u32) -> Option<(Lease, Held)> {
        let invoked = now();
        let service = self.choose_service();
        let request = Acquire::new(TTL).wait(TTL * wait);
        let leases = &self.servers.leases[service];
        self.asks_for_lease(resource, invoked);
        let granted = leases.acquire(&self.resource(resource), request).await;
        let lease = match granted {
            Ok(lease) => lease,
            Err(error) => return self.without_lease(resource, invoked, &error),
        };
        let held = self.granted(
            resource,
            lease.token.get(),
            lease.fencing_token().to_string(),
            invoked,
        );
        Some((lease, held))
    }

    pub(super) fn granted(
        &self,
        resource: usize,
        token: i64,
        field: String,
        invoked: Moment,
    ) -> Held {
        let held = Held {
            resource,
            token,
            field,
        };
        let kind = [Kind::Grant];
        let grant: Vec<_> = operations(&[&held], kind, invoked, Answer::Done).collect();
        self.side.recorder.record(grant);
        held
    }

    /// Records that a lease is about to be requested.
    pub(super) fn asks_for_lease(&self, resource: usize, invoked: Moment) {
        let asked = Operation::grant(resource, invoked, Answer::Unknown);
        self.side.recorder.asks([asked]);
    }

    /// Records a request for a lease without a known grant. If it has no answer, its token may
    /// supersede other tokens. If it was refused, its position in the queue may be kept for three
    /// seconds.
    pub(super) fn not_granted(&self, resource: usize, invoked: Moment, answer: Answer) {
        let operation = Operation::grant(resource, invoked, answer);
        self.side.recorder.record([operation]);
    }

    /// Records the result of a failed request for a lease.
    pub(super) fn without_lease<T>(
        &self,
        resource: usize,
        invoked: Moment,
        error: &LeaseError,
    ) -> Option<T> {
        let answer = match error {
            LeaseError::Held { .. } | LeaseError::TooManyWaiters { .. } => Answer::Undone,
            LeaseError::Unavailable(_) => Answer::Unknown,
            other => panic!("{other:?}"),
        };
        self.not_granted(resource, invoked, answer);
        None
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
            let reads = operations(held, kinds, invoked, answer);
            self.side.recorder.record(reads);
        }
        (answer == Answer::Done).then_some(states)
    }

    /// Writes with single-use tokens: either states computed from a read, or additions to the
    /// current states.
    pub(super) async fn write(
        &mut self,
        held: &[&Held],
        amounts: &[i64],
        read: Option<&[State]>,
    ) -> Answer {
        let writing = self.writing(held, amounts, read);
        let asked = self.asks(held, &writing, TokenUse::SingleUse);
        let answer = self.try_write("", held, &writing, None).await;
        self.answered(asked, answer);
        answer
    }

    /// Writes with a reusable token, and returns the new state.
    pub(super) async fn write_again(&mut self, held: &Held, state: State) -> Option<State> {
        let writing = self.writing(&[held], &[1], Some(&[state]));
        let asked = self.asks(&[held], &writing, TokenUse::Reusable);
        let answer = self.try_write("/again", &[held], &writing, None).await;
        self.answered(asked, answer);
        (answer == Answer::Done).then(|| state.with(writing.entry, 1))
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
            tokens: held.iter().map(|held| held.token).collect(),
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
        let side = if self.side.is_fenced {
            "fenced"
        } else {
            "unfenced"
        };
        let names: Vec<_> = held
            .iter()
            .map(|held| self.side.names[held.resource].as_str())
            .collect();
        let names = names.join("/");
        let service = self.choose_service();
        format!("{}{path}/{side}/{names}", self.servers.urls[service])
    }

    /// Records the operations of a request that is about to be sent.
    pub(super) fn asks(&self, held: &[&Held], writing: &Writing, uses: TokenUse) -> Vec<Operation> {
        let entry = writing.entry;
        let kinds = writing.amounts.iter().map(|&amount| match uses {
            TokenUse::Reusable => Kind::Rewrite { entry, amount },
            _ => Kind::Write { entry, amount },
        });
        let asked: Vec<_> = operations(held, kinds, now(), Answer::Unknown).collect();
        self.side.recorder.asks(asked.iter().copied());
        asked
    }

    /// Records the answer.
    pub(super) fn answered(&self, mut asked: Vec<Operation>, answer: Answer) {
        let answered = now();
        for operation in &mut asked {
            (operation.answered, operation.answer) = (answered, answer);
        }
        if answer == Answer::Done {
            for operation in &asked {
                self.side.done[operation.resource].fetch_add(1, Relaxed);
            }
        }
        self.side.recorder.record(asked);
    }
}

fn operations(
    held: &[&Held],
    kinds: impl IntoIterator<Item = Kind>,
    invoked: Moment,
    answer: Answer,
) -> impl Iterator<Item = Operation> {
    let (parts, answered) = (
        u8::try_from(held.len()).expect("a request has few resources"),
        now(),
    );
    held.iter().zip(kinds).map(move |(held, kind)| Operation {
        kind,
        resource: held.resource,
        token: held.token,
        parts,
        invoked,
        answered,
        answer,
    })
}

fn field(held: &[&Held]) -> String {
    let members: Vec<_> = held.iter().map(|held| held.field.as_str()).collect();
    members.join(", ")
}
