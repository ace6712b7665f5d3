//! What ends a lease: its release, the end of a request that was dropped, and a break.

use tower_fence::{
    Resource, Token,
    lease::{
        LeaseError,
        backend::{Reply, Seen},
    },
};

use super::{
    QuorumBackend,
    answer::{Answer, Found},
    answers::Answers,
    scripts::Subject,
};

/// How often a lease that changes meanwhile is read and ended.
const BREAKS: usize = 20;

fn is_ended(answer: &Answer) -> bool {
    matches!(answer, Answer::Ended)
}

const fn reply(has_ended: bool) -> Reply {
    match has_ended {
        true => Reply::Ended,
        false => Reply::Lost,
    }
}

impl QuorumBackend {
    /// Ends the lease that this process was granted, in one trip. If it was not, or if the lease
    /// has got another token since, the nodes are read first.
    pub(crate) async fn release(&self, subject: &Subject<'_>) -> Result<Reply, LeaseError> {
        let (nodes, resource) = (&self.nodes, subject.resource);
        if let Some(grant) = self.grants.get(resource, &subject.lease) {
            let release = |_| Some(nodes.scripts().release(subject, grant));
            let ends = nodes.ask(subject.source(), release).await?;
            if !ends.prevents(|answer| !is_ended(answer)) {
                // If no majority is left that has it, it is over.
                if ends.given.len() <= nodes.all().len() - nodes.majority() {
                    return Err(ends.no_majority());
                }
                self.grants.forget(resource, &subject.lease);
                return Ok(Reply::Ended);
            }
        }
        let looks = self.look(subject).await?;
        let is_its = |found: &Found| found.lease == subject.lease && found.left.is_some();
        let ends = self.end(subject, &looks, is_its).await?;
        let lost = |answer: &Answer| !answer.found().is_some_and(is_its);
        if looks.prevents(lost) {
            self.grants.forget(resource, &subject.lease);
            return Ok(Reply::Lost);
        }
        match looks.count(lost) + ends.count(is_ended) > nodes.all().len() - nodes.majority() {
            true => {
                self.grants.forget(resource, &subject.lease);
                Ok(Reply::Ended)
            }
            false => Err(ends.no_majority()),
        }
    }

    /// Ends what a request has left on the nodes.
    pub(crate) async fn abandon(
        &self,
        subject: &Subject<'_>,
        ticket: i64,
    ) -> Result<Reply, LeaseError> {
        let known = self.grants.get(subject.resource, &subject.lease);
        if known.is_some_and(|grant| grant.attempt.ticket == ticket) {
            self.grants.forget(subject.resource, &subject.lease);
        }
        let ends = self.undo(subject, ticket).await?;
        match ends.are_enough() {
            true => Ok(reply(ends.count(is_ended) > 0)),
            false => Err(ends.no_majority()),
        }
    }

    pub(crate) async fn undo(
        &self,
        subject: &Subject<'_>,
        ticket: i64,
    ) -> Result<Answers, LeaseError> {
        let abandon = |_| Some(self.nodes.scripts().abandon(subject, ticket));
        self.nodes.ask(subject.source(), abandon).await
    }

    /// Ends the lease that a majority has with this token, on every node that has it; or any lease,
    /// also one that no majority has.
    pub(crate) async fn break_lease(
        &self,
        resource: &Resource,
        seen: Seen<'_>,
        token: Option<Token>,
    ) -> Result<Reply, LeaseError> {
        let subject = Subject::any(resource, seen);
        let mut has_ended = false;
        for _ in 0..BREAKS {
            let looks = self.look(&subject).await?;
            if !looks.are_enough() {
                return Err(looks.no_majority());
            }
            let lease = looks.majority(|answer| {
                let found = answer.found()?;
                let is_one = token.is_none_or(|token| found.token == Some(token));
                is_one.then(|| found.lease.clone())
            });
            if lease.is_none() && token.is_some() {
                return Ok(reply(has_ended));
            }
            let is_one = |found: &Found| token.is_none() || lease.as_ref() == Some(&found.lease);
            let ends = self.end(&subject, &looks, is_one).await?;
            let ended = ends.count(is_ended);
            has_ended |= lease.is_some() && (ended > 0 || token.is_none());
            // A renewal with a new token may have come in between.
            if ended == looks.count(|answer| answer.found().is_some_and(is_one)) {
                return Ok(reply(has_ended));
            }
        }
        Ok(Reply::Again)
    }

    /// What each node has of a lease.
    pub(crate) async fn look(&self, subject: &Subject<'_>) -> Result<Answers, LeaseError> {
        let look = || self.nodes.scripts().look([subject.resource]);
        self.nodes.look(subject.source(), look).await
    }

    /// Ends on each node the very value that was found there, if it is one of these.
    async fn end(
        &self,
        subject: &Subject<'_>,
        looks: &Answers,
        is_one: impl Fn(&Found) -> bool,
    ) -> Result<Answers, LeaseError> {
        let end = |n: usize| {
            let (_, look) = looks.given.iter().find(|(node, _)| *node == n)?;
            let found = look.found().filter(|found| is_one(found))?;
            Some(self.nodes.scripts().end(subject, found))
        };
        self.nodes.ask(subject.source(), end).await
    }
}
