//! Step that renews a lease, with its token or with a new one.

use std::time::Duration;

use tokio::time::Instant;
use tower_fence::{
    Resource,
    lease::{
        LeaseError,
        backend::{Renewal, Reply, Seen},
    },
};

use super::{
    QuorumBackend,
    answer::{Answer, Counter},
    attempt::Grant,
    choice::Wish,
    grant::left_of,
    scripts::{Choice, Subject},
};

impl QuorumBackend {
    /// Renews a lease. If this process has granted the lease, and its token has not changed since,
    /// the nodes need not be read first.
    pub(crate) async fn renew(
        &self,
        resource: &Resource,
        renewal: &Renewal,
        seen: Seen<'_>,
    ) -> Result<Reply, LeaseError> {
        let subject = Subject::new(resource, &renewal.lease, seen);
        let known = self.grants.get(&subject.grant_key());
        if let Some(grant) = known {
            let reply = self.renew_grant(&subject, renewal, seen, grant).await?;
            if !matches!(reply, Reply::Lost) {
                return Ok(reply);
            }
        }
        let Some(grant) = self.find(&subject, known).await? else {
            self.grants.take(&subject.grant_key());
            return Ok(Reply::Lost);
        };
        let reply = self.renew_grant(&subject, renewal, seen, grant).await?;
        if matches!(reply, Reply::Lost)
            && let Some(newer) = self.find(&subject, known).await?
            && newer.token > grant.token
        {
            // Another issuer has renewed the lease with a new token in the meantime.
            return Ok(Reply::Again);
        }
        Ok(reply)
    }

    async fn renew_grant(
        &self,
        subject: &Subject<'_>,
        renewal: &Renewal,
        seen: Seen<'_>,
        grant: Grant,
    ) -> Result<Reply, LeaseError> {
        if renewal.at_least.is_some() || !renewal.new_token {
            let reply = self.same_token(subject, renewal.ttl, seen, grant).await?;
            let has_least = renewal.at_least.is_none_or(|least| grant.token >= least);
            if !matches!(reply, Reply::Granted(_)) || (has_least && !renewal.new_token) {
                return Ok(reply);
            }
        }
        self.another_token(subject, renewal, seen, grant).await
    }

    /// Renews a lease and keeps its token.
    async fn same_token(
        &self,
        subject: &Subject<'_>,
        ttl: Duration,
        seen: Seen<'_>,
        grant: Grant,
    ) -> Result<Reply, LeaseError> {
        let (nodes, began) = (&self.nodes, Instant::now());
        let renew = |_| Some(nodes.scripts.renew(subject, grant, ttl));
        let answers = nodes.ask(subject.source, renew).await?;
        let renewed = |answer: &Answer| match answer {
            Answer::Renewed { token, .. } => Some(*token),
            _ => None,
        };
        if answers.agreed(renewed) != Some(grant.token) {
            return match answers.prevents(|answer| matches!(answer, Answer::Lost)) {
                true => Ok(Reply::Lost),
                false => Err(answers.no_majority()),
            };
        }
        let counters = || {
            let counters = answers.given.iter().filter_map(|(_, answer)| match answer {
                Answer::Renewed { counter, .. } => Some(*counter),
                _ => None,
            });
            counters.filter(|counter| counter.usable)
        };
        // If no counter has an epoch, or all counters are below the highest count that this process
        // has seen, the token may be superseded.
        let highest = counters().map(Counter::counted).max();
        let is_behind = highest.is_none_or(|highest| highest < (seen.epoch, seen.n));
        let Some(ttl) = left_of(ttl, began).filter(|_| !is_behind) else {
            return Ok(Reply::Lost);
        };
        let counted = answers.counted(counters()).unwrap_or((seen.epoch, seen.n));
        let token = grant.token;
        self.granted(subject, grant.attempt, Choice { token, counted }, ttl)
    }

    /// Renews a lease with a new token, which replaces exactly the token of `grant`. If the attempt
    /// fails, it is not undone, because the lease is still held with its earlier token.
    async fn another_token(
        &self,
        subject: &Subject<'_>,
        renewal: &Renewal,
        seen: Seen<'_>,
        grant: Grant,
    ) -> Result<Reply, LeaseError> {
        let (nodes, began) = (&self.nodes, Instant::now());
        // A renewal has no ticket, so its attempt gets a random one.
        let attempt = self.attempts.next(rand::random_range(1..=i64::MAX));
        let (ttl, token) = (renewal.ttl, grant.token);
        let retake = |_| Some(nodes.scripts.retake(subject, attempt, ttl, token));
        let answers = nodes.ask(subject.source, retake).await?;
        let wish = Wish::Another {
            replaced: token,
            at_least: renewal.at_least,
        };
        let choice = match self.token(subject, attempt, answers, wish, seen).await? {
            Ok(choice) => choice,
            Err(refused) => return Ok(refused),
        };
        let Some(ttl) = left_of(renewal.ttl, began) else {
            return Ok(Reply::Lost);
        };
        self.granted(subject, attempt, choice, ttl)
    }

    /// Reads the token of a lease that a majority has, and the attempt to which it was granted.
    ///
    /// A script of the known attempt, or of an earlier one, may have run late and may have sealed a
    /// token that was never granted. A token that such an attempt has sealed is skipped.
    async fn find(
        &self,
        subject: &Subject<'_>,
        known: Option<Grant>,
    ) -> Result<Option<Grant>, LeaseError> {
        let answers = self.read(subject).await?;
        let grant = |answer: &Answer| {
            let found = answer.found()?;
            let grant = found.grant()?;
            let is_late = known.is_some_and(|known| {
                found.has_mark && grant.attempt.number <= known.attempt.number
            });
            let is_its = found.lease == subject.lease && found.left.is_some();
            (is_its && !is_late).then_some(grant)
        };
        if let Some(token) = answers.agreed(|answer| grant(answer).map(|grant| grant.token)) {
            let grants = answers.given.iter().filter_map(|(_, answer)| grant(answer));
            return Ok(grants.filter(|grant| grant.token == token).max());
        }
        match answers.prevents(|answer| grant(answer).is_none()) {
            true => Ok(None),
            false => Err(answers.no_majority()),
        }
    }
}
