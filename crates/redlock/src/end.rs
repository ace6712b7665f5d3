//! Steps that remove a lease: a release, the clean-up after a dropped request, and a break.

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
    attempt::Attempt,
    list::held_by,
    scripts::Subject,
};

/// Maximum number of attempts of a break. An attempt is repeated if the lease has changed between
/// the read and the removal.
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
    /// Releases a lease. If this process has granted the lease, and its token has not changed
    /// since, the release takes one round trip. Otherwise the nodes are read first.
    pub(crate) async fn release(&self, subject: &Subject<'_>) -> Result<Reply, LeaseError> {
        let (nodes, resource) = (&self.nodes, subject.resource);
        if let Some(grant) = self.grants.get(resource, &subject.lease) {
            let release = |_| Some(nodes.scripts().release(subject, grant));
            let ends = nodes.ask(subject.source(), release).await?;
            // The lease is released if the nodes that have not removed it are not a majority. A
            // node without this key may have the lease under another token.
            if ends.count(is_ended) > nodes.all().len() - nodes.majority() {
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

    /// Deletes the keys of an abandoned request on the nodes.
    pub(crate) async fn abandon(
        &self,
        subject: &Subject<'_>,
        ticket: i64,
    ) -> Result<Reply, LeaseError> {
        let known = self.grants.get(subject.resource, &subject.lease);
        if known.is_some_and(|grant| grant.attempt.ticket == ticket) {
            self.grants.forget(subject.resource, &subject.lease);
        }
        let ends = self.undo(subject, Attempt::last_of(ticket)).await?;
        match ends.are_enough() {
            true => Ok(reply(ends.count(is_ended) > 0)),
            false => Err(ends.no_majority()),
        }
    }

    /// Deletes the keys of a request's attempts, up to and including this attempt.
    pub(crate) async fn undo(
        &self,
        subject: &Subject<'_>,
        newest: Attempt,
    ) -> Result<Answers, LeaseError> {
        let abandon = |_| Some(self.nodes.scripts().abandon(subject, newest));
        self.nodes.ask(subject.source(), abandon).await
    }

    /// If a majority has the lease with this token, breaks it on every node that has it. Without a
    /// token, breaks every lease of the resource, even one that no majority has.
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
                // The nodes without a reply may have the lease as well.
                if held_by(&looks, 0, looks.needed()).is_some_and(|held| token == Some(held.token))
                {
                    return Err(looks.no_majority());
                }
                return Ok(reply(has_ended));
            }
            let is_one = |found: &Found| token.is_none() || lease.as_ref() == Some(&found.lease);
            let ends = self.end(&subject, &looks, is_one).await?;
            let ended = ends.count(is_ended);
            has_ended |= lease.is_some() && (ended > 0 || token.is_none());
            // If the numbers differ, a lease has changed since it was read, for example by a
            // renewal.
            if ended == looks.count(|answer| answer.found().is_some_and(is_one)) {
                return Ok(reply(has_ended));
            }
        }
        Ok(Reply::Again)
    }

    /// Reads the lease of the resource on each node.
    pub(crate) async fn look(&self, subject: &Subject<'_>) -> Result<Answers, LeaseError> {
        let look = || self.nodes.scripts().look([subject.resource]);
        self.nodes.look(subject.source(), look).await
    }

    /// Deletes the lease that was read on each node, if it matches `is_one` and its value has not
    /// changed since.
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
