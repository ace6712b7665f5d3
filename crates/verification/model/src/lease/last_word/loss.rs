//! Losses and forged tokens.

use super::{
    LastWord, Step,
    database::EPOCH,
    state::{Issuer, Server, State},
};

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Loss {
    /// Redis loses its leases, and counts in a new epoch.
    RedisRestarts,
    /// The keys are restored to an earlier state. Issuers that have just started accept these keys.
    KeysAreCopiedBack,
    /// A replica is promoted. The old master continues to run, because it has not detected its
    /// replacement.
    ReplicaIsPromoted,
    /// An issuer restarts, and loses the record of the tokens that it has announced.
    IssuerRestarts(u8),
    /// The database loses the data that was not on disk.
    DatabaseCrashes,
    /// The database loses the data that the standby has not received.
    StandbyIsPromoted,
}

/// The first token of an epoch that is far above all assigned epochs.
const FAR: u8 = 12 * EPOCH;

impl LastWord {
    pub(super) fn losses(&self, state: &State, steps: &mut Vec<Step>) {
        let server = &state.servers[usize::from(state.master)];
        if state.forged < self.forged {
            // The forged token is one that the store will grant later, or one that it never grants.
            let last = match self.one_database {
                true => state.database.seen(),
                false => server.counter,
            };
            let forge = |token, reusable| Step::Forge { token, reusable };
            steps.push(forge(last + 2, false));
            steps.push(forge(FAR, false));
            if self.next_is_forged {
                steps.push(forge(last + 1, true));
            }
        }
        if state.losses == self.most {
            return;
        }
        let comes = |loss| self.losses.contains(&loss);
        if comes(Loss::KeysAreCopiedBack) && state.saved.is_none() {
            steps.push(Step::RedisIsSaved);
        }
        if comes(Loss::StandbyIsPromoted) && state.standby.is_none() {
            steps.push(Step::StandbyFallsBehind);
        }
        let happens = |loss: &Loss| match loss {
            Loss::RedisRestarts => true,
            Loss::KeysAreCopiedBack => state.saved.as_ref().is_some_and(|saved| saved != server),
            Loss::ReplicaIsPromoted => state.master == 0,
            Loss::IssuerRestarts(issuer) => *issuer < self.issuers,
            Loss::DatabaseCrashes => state.disk != state.database,
            Loss::StandbyIsPromoted => state
                .standby
                .as_ref()
                .is_some_and(|standby| *standby != state.database),
        };
        let losses = self.losses.iter().copied().filter(happens);
        steps.extend(losses.map(Step::Lose));
    }

    pub(super) fn lose(&self, state: &mut State, loss: Loss) {
        state.losses += 1;
        let master = usize::from(state.master);
        match loss {
            Loss::RedisRestarts => state.servers[master] = self.new_epoch(state),
            Loss::KeysAreCopiedBack => {
                state.servers[master] = state.saved.take().expect("the keys were saved");
            }
            Loss::ReplicaIsPromoted => {
                state.servers[1] = self.new_epoch(state);
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
            Loss::DatabaseCrashes => state.database = state.disk.clone(),
            Loss::StandbyIsPromoted => {
                let timeline = state.database.timeline + 1;
                state.database = state.standby.take().expect("a standby lags");
                state.database.timeline = timeline;
                state.disk = state.database.clone();
            }
        }
    }

    fn new_epoch(&self, state: &mut State) -> Server {
        let epoch = state.database.next_epoch(self.rules);
        state.disk = state.database.clone();
        state.past.epoch = state.past.epoch.max(epoch);
        Server {
            counter: epoch * EPOCH,
            lease: None,
        }
    }
}
