//! The recording of the requests of clients and of their answers.

use std::sync::atomic::Ordering::Relaxed;

use tower_fence::{TokenUse, header::FencingToken};

use super::Side;
use crate::{
    history::{Answer, Kind, Moment, Operation, now},
    service::Writing,
};

/// A held lease: the number of its resource, and its token.
#[derive(Clone, Debug)]
pub struct Held {
    pub resource: usize,
    pub token: FencingToken,
}

impl Side {
    /// Sends and records a request for a lease. If it has no answer, its token may supersede other
    /// tokens. If it was refused, its position in the queue may be kept for three seconds.
    pub async fn grant<L>(
        &self,
        resource: usize,
        request: impl Future<Output = Result<(L, FencingToken), Answer>>,
    ) -> Result<(L, Held), Answer> {
        let asked = Operation::grant(resource, now(), Answer::Unknown);
        self.recorder.asks([asked]);
        let granted = request.await;
        let (token, answer) = match &granted {
            Ok((_, token)) => (token.token.get(), Answer::Done),
            Err(answer) => (0, *answer),
        };
        self.answered(vec![Operation { token, ..asked }], answer);
        granted.map(|(lease, token)| (lease, Held { resource, token }))
    }

    /// Sends and records a write.
    pub async fn write(
        &self,
        held: &[&Held],
        writing: &Writing,
        token_use: TokenUse,
        request: impl Future<Output = Answer>,
    ) -> Answer {
        let entry = writing.entry;
        let kinds = writing.amounts.iter().map(|&amount| match token_use {
            TokenUse::Reusable => Kind::Rewrite { entry, amount },
            _ => Kind::Write { entry, amount },
        });
        let asked = operations(held, kinds, now());
        self.recorder.asks(asked.iter().copied());
        let answer = request.await;
        self.answered(asked, answer);
        answer
    }

    /// Records the answer to the operations of a request.
    pub fn answered(&self, mut operations: Vec<Operation>, answer: Answer) {
        let answered = now();
        for operation in &mut operations {
            (operation.answered, operation.answer) = (answered, answer);
            if answer == Answer::Done && operation.written().is_some() {
                self.done[operation.resource].fetch_add(1, Relaxed);
            }
        }
        self.recorder.record(operations);
    }
}

/// Returns the operations of a request without an answer.
pub fn operations(
    held: &[&Held],
    kinds: impl Iterator<Item = Kind>,
    invoked: Moment,
) -> Vec<Operation> {
    let parts = u8::try_from(held.len()).expect("a request has few resources");
    let operations = held.iter().zip(kinds).map(|(held, kind)| Operation {
        kind,
        token: held.token.token.get(),
        parts,
        ..Operation::grant(held.resource, invoked, Answer::Unknown)
    });
    operations.collect()
}
