//! Steps that remove a lease: a release, the clean-up after a dropped request, and a break.

use std::collections::HashSet;

use tower_fence::{
    Token,
    lease::{LeaseError, backend::Reply},
};

use super::{
    QuorumBackend,
    answer::{Answer, Found},
    answers::Answers,
    attempt::{Attempt, Grant},
    scripts::Subject,
};

/// Maximum number of attempts of a break. An attempt is repeated if the lease has changed between
/// the read and the removal.
const BREAK_ATTEMPTS: usize = 20;

fn has_ended(answer: &Answer) -> bool {
    matches!(answer, Answer::Ended)
}

fn may_have_ended(answer: &Answer) -> bool {
    matches!(answer, Answer::Ended | Answer::MayHaveEnded)
}

/// Returns the reply to a step that has or has not ended a lease.
const fn reply(is_ended: bool) -> Reply {
    match is_ended {
        true => Reply::Ended,
        false => Reply::Lost,
    }
}

/// Returns whether a release has ended a lease that a majority of the nodes no longer has, or
/// `None` if this is unknown.
///
/// `first` contains the replies to the release, if it was sent, and `read` those to the read after
/// it. The release has ended the lease if at least one node had the lease, and if a majority had it
/// or may have had it. A node may have had the lease if its reply to the release or to the read is
/// missing. If no node reports that it had the lease, but a majority may have had it, the outcome
/// of the release is unknown.
fn is_released(
    first: Option<&Answers>,
    read: &Answers,
    has_it: impl Fn(&Answer) -> bool,
) -> Option<bool> {
    let (mut had, mut may_have_had) = (0, 0);
    for node in 0..read.nodes {
        let end = first.and_then(|ends| ends.of_node(node));
        match (end, read.of_node(node)) {
            (Some(end), _) if may_have_ended(end) => had += 1,
            (_, Some(read)) if has_it(read) => had += 1,
            (None, Some(_)) if first.is_some() => may_have_had += 1,
            (_, None) => may_have_had += 1,
            _ => {}
        }
    }
    let may_be_released = had + may_have_had >= read.majority();
    match first {
        Some(_) if had == 0 && may_be_released => None,
        _ => Some(had > 0 && may_be_released),
    }
}

impl QuorumBackend {
    /// Releases a lease. If this process has granted the lease, and its token has not changed
    /// since, the release takes one round trip. Otherwise the nodes are read first.
    pub(crate) async fn release(&self, subject: &Subject<'_>) -> Result<Reply, LeaseError> {
        let (nodes, key) = (&self.nodes, subject.grant_key());
        // The lease is released if the nodes that have not removed it are not a majority.
        let suffices = |gone: usize| gone > nodes.all.len() - nodes.majority();
        // The replies to the release with the grant that this process has in memory.
        let mut first = None;
        if let Some(grant) = self.grants.get(&key) {
            let release = |_| Some(nodes.scripts.release(subject, grant));
            let ends = nodes.ask(subject.source, release).await?;
            // A node without this key may have the lease under another token.
            if suffices(ends.count(has_ended)) {
                self.grants.take(&key);
                return Ok(Reply::Ended);
            }
            first = Some(ends);
        }
        let answers = self.read(subject).await?;
        let is_its = |found: &Found| found.lease == subject.lease && found.left.is_some();
        let has_it = |answer: &Answer| answer.found().is_some_and(is_its);
        let ends = self.end(subject, &answers, is_its).await?;
        let mut gone = answers.count(|answer| !has_it(answer)) + ends.count(has_ended);
        if !suffices(gone) && ends.count(may_have_ended) > ends.count(has_ended) {
            // A node that may have removed the key may instead still have the lease, with another
            // token.
            gone = self.read(subject).await?.count(|answer| !has_it(answer));
        }
        if !suffices(gone) {
            let unknown = if answers.are_enough() { ends } else { answers };
            return Err(unknown.no_majority());
        }
        let Some(is_released) = is_released(first.as_ref(), &answers, has_it) else {
            return Err(first.unwrap_or(answers).no_majority());
        };
        self.grants.take(&key);
        Ok(reply(is_released))
    }

    /// Deletes the keys of an abandoned request on the nodes.
    pub(crate) async fn abandon(
        &self,
        subject: &Subject<'_>,
        ticket: i64,
    ) -> Result<Reply, LeaseError> {
        let key = subject.grant_key();
        let is_its = |grant: Grant| grant.attempt.ticket == ticket;
        if self.grants.get(&key).is_some_and(is_its) {
            self.grants.take(&key);
        }
        let ends = self.undo(subject, Attempt::last_of(ticket)).await?;
        match ends.are_enough() {
            true => Ok(reply(ends.count(may_have_ended) > 0)),
            false => Err(ends.no_majority()),
        }
    }

    /// Deletes the keys of a request's attempts, up to and including this attempt.
    pub(crate) async fn undo(
        &self,
        subject: &Subject<'_>,
        newest: Attempt,
    ) -> Result<Answers, LeaseError> {
        let abandon = |_| Some(self.nodes.scripts.abandon(subject, newest));
        self.nodes.ask(subject.source, abandon).await
    }

    /// If a majority has the lease with this token, breaks it on every node that has it.
    pub(crate) async fn break_token(
        &self,
        subject: &Subject<'_>,
        token: Token,
    ) -> Result<Reply, LeaseError> {
        let has = |answer: &Answer, lease: &str| {
            let mut found = answer.found().into_iter();
            found.any(|found| found.lease == lease)
        };
        let mut broken: Option<String> = None;
        for _ in 0..BREAK_ATTEMPTS {
            let answers = self.read_majority(subject).await?;
            let most = answers.most(|answer| {
                let found = answer.found().filter(|found| found.token == Some(token))?;
                Some(found.lease.clone())
            });
            // The nodes without a reply may have the lease as well.
            let Some((lease, count)) = most.filter(|(_, count)| *count >= answers.needed()) else {
                // A lease that was renewed with a new token in the meantime is not broken.
                let is_kept =
                    |lease: &String| answers.count(|answer| has(answer, lease)) >= answers.needed();
                return Ok(reply(broken.is_some_and(|lease| !is_kept(&lease))));
            };
            // Only a lease that a majority had before, and that no node has with another token, is
            // known to be broken.
            let had_majority = broken.as_ref() == Some(&lease);
            let has_other_token = answers.count(|answer| has(answer, &lease)) > count;
            if count < answers.majority() && (!had_majority || has_other_token) {
                return Err(answers.no_majority());
            }
            if self
                .end_all(subject, &answers, |found| found.lease == lease)
                .await?
            {
                return Ok(Reply::Ended);
            }
            broken = Some(lease);
        }
        Ok(Reply::Again)
    }

    /// Breaks every lease of the resource, even one that no majority has. The reply is
    /// [`Reply::Ended`] if a majority may have had a lease.
    pub(crate) async fn break_all(&self, subject: &Subject<'_>) -> Result<Reply, LeaseError> {
        let mut was_held = false;
        // The leases of the first read. A later round must not end the lease of a later holder.
        let mut first: Option<HashSet<String>> = None;
        for _ in 0..BREAK_ATTEMPTS {
            let answers = self.read_majority(subject).await?;
            let lease_of = |answer: &Answer| Some(answer.found()?.lease.clone());
            let most = answers.most(lease_of);
            // The nodes without a reply may have the lease as well.
            was_held |= most.is_some_and(|(_, count)| count >= answers.needed());
            let first = first.get_or_insert_with(|| {
                let given = answers.given.iter();
                given.filter_map(|(_, answer)| lease_of(answer)).collect()
            });
            let is_one = |found: &Found| first.contains(&found.lease);
            if self.end_all(subject, &answers, is_one).await? {
                return Ok(reply(was_held));
            }
        }
        Ok(Reply::Again)
    }

    /// Reads the lease of the resource on each node, of which a majority must reply.
    async fn read_majority(&self, subject: &Subject<'_>) -> Result<Answers, LeaseError> {
        let answers = self.read(subject).await?;
        match answers.are_enough() {
            true => Ok(answers),
            false => Err(answers.no_majority()),
        }
    }

    /// Reads the lease of the resource on each node.
    pub(crate) async fn read(&self, subject: &Subject<'_>) -> Result<Answers, LeaseError> {
        let read = |_| Some(self.nodes.scripts.read([subject.resource]));
        self.nodes.ask(subject.source, read).await
    }

    /// Deletes the leases like [`end`](Self::end). Returns false if a lease remains, because it has
    /// changed since it was read, for example by a renewal, or if some replies are missing.
    async fn end_all(
        &self,
        subject: &Subject<'_>,
        answers: &Answers,
        is_one: impl Fn(&Found) -> bool,
    ) -> Result<bool, LeaseError> {
        let found = answers.count(|answer| answer.found().is_some_and(&is_one));
        let ends = self.end(subject, answers, &is_one).await?;
        Ok(ends.count(has_ended) == found)
    }

    /// On each node, deletes the lease that was read there, if `is_one` returns true for it and its
    /// value has not changed since.
    async fn end(
        &self,
        subject: &Subject<'_>,
        answers: &Answers,
        is_one: impl Fn(&Found) -> bool,
    ) -> Result<Answers, LeaseError> {
        let end = |n: usize| {
            let found = answers.of_node(n)?.found().filter(|found| is_one(found))?;
            Some(self.nodes.scripts.end(subject, found))
        };
        self.nodes.ask(subject.source, end).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn release_needs_a_majority_that_may_have_had_the_lease() {
        // Here, `Sealed` is the reply of a node that has the lease.
        let has_it = |answer: &Answer| matches!(answer, Answer::Sealed);
        let answers = |letters: &str| {
            let answers = letters.chars().map(|letter| match letter {
                'h' => Answer::Sealed,
                '-' => Answer::Lost,
                'e' => Answer::Ended,
                'm' => Answer::MayHaveEnded,
                _ => Answer::None,
            });
            Answers::of(3, answers.collect())
        };
        // The replies to the release and to the read, and whether the lease is released.
        for (first, read, expected) in [
            // The release was not sent, because this process has no grant in memory.
            (None, "hh-", Some(true)),
            (None, "h-", Some(true)),
            (None, "h--", Some(false)),
            (None, "--", Some(false)),
            // The release was sent.
            (Some("emn"), "---", Some(true)),
            (Some("enn"), "---", Some(false)),
            (Some("nnn"), "---", Some(false)),
            (Some("en"), "---", Some(true)),
            (Some("n"), "---", None),
            (Some(""), "---", None),
        ] {
            let released = is_released(first.map(answers).as_ref(), &answers(read), has_it);
            assert_eq!(released, expected, "{first:?} {read}");
        }
    }
}
