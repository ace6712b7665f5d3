//! The losses.

use super::{
    Losses, Rule, Step,
    server::Keys,
    state::{Issuer, Phase, State},
};

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Loss {
    /// Redis restarts empty, with a new replication id.
    RedisRestartsEmpty,
    /// Redis restarts with its keys of an earlier moment, and with a new replication id.
    RedisRestartsFromAnOldFile,
    /// Redis restarts with all its keys, and with a new replication id.
    RedisRestarts,
    /// Redis loses all keys, and keeps its replication id.
    RedisIsFlushed,
    /// Redis loses the token counter. It keeps its replication id and the lease.
    CounterIsEvicted,
    /// The keys are restored to an earlier state. Redis keeps its replication id.
    KeysAreCopiedBack,
    /// A replica is promoted. The old master continues to run, because it has not detected its
    /// replacement.
    ReplicaIsPromoted,
    /// An issuer loses its memory.
    IssuerRestarts(u8),
    /// The database loses the data that was not on disk.
    DatabaseCrashes,
    /// The database loses the data that the standby has not received.
    StandbyIsPromoted,
}

impl Losses {
    pub(super) fn losses(&self, state: &State, steps: &mut Vec<Step>) {
        if state.past.just_forgot && self.is_last_epoch_seen(state) {
            steps.push(Step::AMinutePasses);
        }
        if state.losses == self.most {
            return;
        }
        let server = &state.servers[usize::from(state.master)];
        let database = &state.databases[0];
        let comes = |loss| self.losses.contains(&loss);
        let uses_file = comes(Loss::RedisRestartsFromAnOldFile)
            || comes(Loss::KeysAreCopiedBack)
            || comes(Loss::ReplicaIsPromoted);
        if uses_file && state.saved.is_none() && server.keys != Keys::default() {
            steps.push(Step::RedisIsSaved);
        }
        if comes(Loss::StandbyIsPromoted) && database.standby.is_none() {
            steps.push(Step::StandbyFallsBehind);
        }
        // Redis and the issuers must not lose an epoch shortly after the database has lost it,
        // unless the database detects its own loss. Otherwise no component would know the epoch.
        let is_epoch_known = self.notices || !state.past.just_forgot;
        let happens = |loss: &Loss| match loss {
            Loss::RedisRestartsEmpty | Loss::RedisIsFlushed => {
                is_epoch_known && server.keys != Keys::default()
            }
            Loss::RedisRestartsFromAnOldFile => {
                is_epoch_known
                    && state
                        .saved
                        .as_ref()
                        .is_some_and(|saved| *saved != server.keys)
            }
            // No request may be in progress. A script that was sent before the restore could
            // contain an older count than its issuer has in memory.
            Loss::KeysAreCopiedBack => {
                state
                    .saved
                    .as_ref()
                    .is_some_and(|saved| *saved != server.keys)
                    && state.requests.iter().all(Option::is_none)
            }
            Loss::CounterIsEvicted => is_epoch_known && server.keys.counter.is_some(),
            Loss::RedisRestarts => server.keys != Keys::default(),
            Loss::ReplicaIsPromoted => {
                // The master must have an epoch. Otherwise both the old master and the new one
                // could begin an epoch.
                let counter = server.keys.counter.as_ref();
                let counts = |counter: &super::server::Counter| {
                    counter.n.is_some() && counter.replication_id == server.replication_id
                };
                is_epoch_known && state.master == 0 && counter.is_some_and(counts)
            }
            Loss::IssuerRestarts(issuer) => {
                is_epoch_known && state.issuers[usize::from(*issuer)] != Issuer::default()
            }
            Loss::DatabaseCrashes => database.disk != database.epoch,
            Loss::StandbyIsPromoted => {
                let standby = database.standby;
                let counter = server.keys.counter.as_ref();
                let knows = |counter: &super::server::Counter| counter.epoch >= state.past.begun;
                standby.is_some_and(|epoch| epoch != database.epoch)
                    && (self.notices || is_epoch_known && counter.is_some_and(knows))
            }
        };
        let losses = self.losses.iter().copied().filter(happens);
        steps.extend(losses.map(Step::Lose));
    }

    /// Whether an issuer has seen the last epoch.
    fn is_last_epoch_seen(&self, state: &State) -> bool {
        let mut issuers = state.issuers.iter();
        // No request takes a minute, so no request may have an epoch that has not begun.
        let mut requests = state.requests.iter().flatten();
        issuers.any(|issuer| issuer.seen.0 == state.past.begun)
            && !requests.any(|request| matches!(request.phase, Phase::HasEpoch(..)))
    }

    pub(super) fn lose(&self, state: &mut State, step: Step) {
        let loss = match step {
            Step::Lose(loss) => loss,
            Step::RedisIsSaved => {
                let server = &state.servers[usize::from(state.master)];
                state.saved = Some(server.keys.clone());
                return;
            }
            Step::StandbyFallsBehind => {
                state.databases[0].standby = Some(state.databases[0].epoch);
                return;
            }
            _ => return self.re_report(state),
        };
        state.losses += 1;
        let server = &mut state.servers[usize::from(state.master)];
        let mut next_replication_id = || {
            state.replication_ids += 1;
            state.replication_ids
        };
        match loss {
            Loss::RedisRestartsEmpty => {
                server.replication_id = next_replication_id();
                server.keys = Keys::default();
            }
            Loss::RedisRestartsFromAnOldFile => {
                server.replication_id = next_replication_id();
                server.keys = state.saved.take().expect("the keys were saved");
            }
            Loss::RedisRestarts => server.replication_id = next_replication_id(),
            Loss::RedisIsFlushed => server.keys = Keys::default(),
            Loss::CounterIsEvicted => server.keys.counter = None,
            Loss::KeysAreCopiedBack => {
                server.keys = state.saved.take().expect("the keys were saved")
            }
            Loss::ReplicaIsPromoted => {
                let keys = server.keys.clone();
                state.servers[1].replication_id = next_replication_id();
                state.servers[1].keys = state.saved.take().unwrap_or(keys);
                state.master = 1;
            }
            Loss::IssuerRestarts(restarted) => {
                let issuer = &mut state.issuers[usize::from(restarted)];
                let server = issuer.server;
                *issuer = Issuer {
                    server,
                    ..Issuer::default()
                };
                for request in &mut state.requests {
                    request.take_if(|request| request.issuer == restarted);
                }
            }
            Loss::DatabaseCrashes => state.databases[0].crash(),
            Loss::StandbyIsPromoted => {
                state.databases[0].promote(self.notices);
                state.past.just_forgot = !self.notices;
            }
        }
    }

    /// Reports the epoch of each issuer to the database, as issuers do each minute.
    fn re_report(&self, state: &mut State) {
        state.past.just_forgot = false;
        if !self.rules.has(Rule::Again) {
            return;
        }
        for (number, issuer) in (0..).zip(&mut state.issuers) {
            let epoch = issuer.seen.0;
            if epoch > 0 {
                let alive =
                    state.databases[self.application(number)].report_epoch(epoch, self.rules);
                if alive > epoch {
                    issuer.seen = issuer.seen.max((alive - 1, self.numbers - 1));
                }
            }
        }
    }
}
