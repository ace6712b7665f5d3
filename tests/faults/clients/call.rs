//! What clients ask the services for, and how that is written down.

use std::sync::atomic::Ordering::Relaxed;

use tower_fence::lease::{Acquire, Lease, Leases};

use super::{Client, TTL};
use crate::{
    history::{Answer, Kind, Moment, Operation, State},
    service::Writing,
};

/// What a request is made under: the number of each of its resources, its token, and the member of the header.
#[derive(Clone, Debug)]
pub struct Held {
    pub resource: usize,
    pub token: i64,
    pub field: String,
}

impl Client {
    pub(super) fn now(&self) -> Moment {
        self.side.recorder.now()
    }

    /// Takes a lease that is not renewed, and waits in line for so many leases at most.
    pub(super) async fn acquire(&mut self, resource: usize, wait: u32) -> Option<(Lease, Held)> {
        let invoked = self.now();
        let service = self.choose_service();
        let request = Acquire::new(TTL).wait(TTL * wait);
        let leases = &self.servers.leases[service];
        let lease = leases
            .acquire(&self.resource(resource), request)
            .await
            .ok()?;
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
        self.record(&[&held], &[Kind::Grant], invoked, Answer::Done);
        held
    }

    pub(super) async fn release(&mut self, lease: &Lease) {
        let service = self.choose_service();
        let _ = self.servers.leases[service]
            .release(&lease.resource, &lease.id)
            .await;
    }

    /// Reads with tokens, or without.
    pub(super) async fn read(&mut self, held: &[&Held], with_tokens: bool) -> Option<Vec<State>> {
        let invoked = self.now();
        let url = self.url("", held);
        let mut request = self.servers.http.get(url);
        if with_tokens {
            request = request.header("Fencing-Token", field(held));
        }
        let answer = request.send().await.ok()?;
        if answer.status() != 200 {
            return None;
        }
        let states: Vec<State> = answer.json().await.ok()?;
        if with_tokens {
            let kinds: Vec<_> = states.iter().map(|state| Kind::Read(*state)).collect();
            self.record(held, &kinds, invoked, Answer::Done);
        }
        Some(states)
    }

    /// Writes once, what was computed from what was read; or adds it to what is there.
    pub(super) async fn write(
        &mut self,
        held: &[&Held],
        amounts: &[i64],
        read: Option<&[State]>,
    ) -> Answer {
        let writing = self.writing(held, amounts, read);
        let invoked = self.now();
        let answer = self.try_write("", held, &writing, None).await;
        let write = |amount: &i64| Kind::Write {
            entry: writing.entry,
            amount: *amount,
        };
        let kinds: Vec<_> = amounts.iter().map(write).collect();
        self.record(held, &kinds, invoked, answer);
        answer
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

    /// One request, which is not written down.
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
        match answer.status().as_u16() {
            200 => Answer::Done,
            403 | 409 | 412 => Answer::Refused,
            500 | 503 => Answer::Unknown,
            status => panic!("{status}: {:?} {writing:?}", answer.text().await),
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

    pub(super) fn record(&self, held: &[&Held], kinds: &[Kind], invoked: Moment, answer: Answer) {
        let answered = self.now();
        let parts = u8::try_from(held.len()).expect("a few");
        let operations = held.iter().zip(kinds).map(|(held, kind)| Operation {
            kind: *kind,
            resource: held.resource,
            token: held.token,
            parts,
            invoked,
            answered,
            answer,
        });
        self.side.recorder.record(operations);
        let is_write = matches!(kinds[0], Kind::Write { .. } | Kind::Rewrite { .. });
        if is_write && answer != Answer::Unknown {
            self.side.answered[self.workload].fetch_add(1, Relaxed);
        }
    }
}

fn field(held: &[&Held]) -> String {
    let members: Vec<_> = held.iter().map(|held| held.field.as_str()).collect();
    members.join(", ")
}
