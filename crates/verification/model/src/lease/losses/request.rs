//! A request at an issuer. Each step uses the answer of the previous step, and sends the next call.

use super::{
    Losses, Promise, Rule, Step,
    server::{Answer, Blank, Call, Place, Script},
    state::{Grant, HOLDERS, Holder, Kind, Of, Phase, Request, State},
};

impl Losses {
    /// Lists the requests that a holder may send.
    pub(super) fn asks(&self, state: &State, holder: usize, steps: &mut Vec<Step>) {
        // The issuers are interchangeable, so the first request goes to the first issuer.
        let is_first = state.holders == [Holder::New; HOLDERS];
        let issuers = match is_first && self.applications == 1 {
            true => 1,
            false => self.issuers,
        };
        let of = Of(holder);
        let number = u8::try_from(holder).expect("there are few holders");
        for issuer in 0..u8::try_from(issuers).expect("there are few issuers") {
            if self.application(issuer) != self.application(number) {
                continue;
            }
            let mut ask = |kind| steps.push(Step::Ask(kind, of, issuer));
            match state.holders[holder] {
                Holder::New | Holder::Asks => ask(Kind::Acquire),
                Holder::Holds(_) => {
                    let new_tokens = state.new_tokens < self.new_tokens;
                    Kind::of_holder(self.releases, self.renewals, new_tokens).for_each(ask);
                }
                Holder::Done => {}
            }
        }
    }

    pub(super) fn ask(&self, state: &mut State, Of(holder): Of, issuer: u8, kind: Kind) {
        match kind {
            Kind::Acquire => state.holders[holder] = Holder::Asks,
            Kind::Renew { new_token } => state.new_tokens += u8::from(new_token),
            Kind::Release => state.holders[holder] = Holder::Done,
        }
        let id = u8::try_from(holder).expect("there are few holders");
        let seen = state.issuers[usize::from(issuer)].seen;
        state.requests[holder] = Some(Request {
            id,
            issuer,
            kind,
            phase: Phase::Sent {
                seen,
                replaces: false,
            },
            after: self.highest(state, id),
        });
    }

    /// Returns the next step of a request.
    pub(super) fn goes_on(of: Of, request: &Request) -> Step {
        match request.phase {
            Phase::Sent { .. } => Step::ScriptRuns(of),
            Phase::NeedsEpoch(_) => Step::EpochIsTaken(of),
            Phase::HasEpoch(..) => Step::EpochBegins(of),
            Phase::Behind => Step::MasterIsFoundAgain(of),
            Phase::Granted(_) => Step::IsAnswered(of),
        }
    }

    /// Takes the next step of a request.
    pub(super) fn go_on(&self, state: &mut State, of: Of) {
        let request = state.requests[of.0]
            .take()
            .expect("the request is in progress");
        let next = match request.phase {
            Phase::Sent { seen, replaces } => self.run_script(state, of, &request, seen, replaces),
            Phase::NeedsEpoch(blank) => Some(self.take_epoch(state, &request, blank)),
            Phase::HasEpoch(blank, epoch) => Some(self.begin_epoch(state, &request, blank, epoch)),
            Phase::Behind => Some(self.find_master(state, &request)),
            Phase::Granted(grant) => self.answer(state, of, &request, grant),
        };
        state.requests[of.0] = next.map(|phase| Request { phase, ..request });
    }

    fn run_script(
        &self,
        state: &mut State,
        of: Of,
        request: &Request,
        seen: Place,
        replaces: bool,
    ) -> Option<Phase> {
        let call = self.call(request, seen, replaces);
        let issuer = usize::from(request.issuer);
        // A script that replaces a counter runs on the server that was just found to be the master.
        if replaces && self.rules.has(Rule::FindMaster) {
            state.issuers[issuer].server = state.master;
        }
        let server = state.issuers[issuer].server;
        let mut script = self.script(state, server);
        let is_of_last_epoch = script.is_of_last_epoch(call);
        let answer = match request.kind {
            Kind::Acquire => script.acquire(call),
            Kind::Renew { new_token } => script.renew(call, new_token),
            Kind::Release => {
                if script.release(call) {
                    // The release may have removed the lease of another holder.
                    state.past.ended |= 1 << request.id;
                }
                return None;
            }
        };
        match answer {
            Answer::Granted { token, place } => Some(Phase::Granted(Grant {
                token,
                place,
                server,
                by_master: server == state.master,
            })),
            Answer::NeedsEpoch(blank) => Some(Phase::NeedsEpoch(blank)),
            Answer::Behind if self.rules.has(Rule::BeginsAbove) => Some(Phase::Behind),
            // The holder retries, or gives up.
            Answer::Behind | Answer::Held | Answer::OtherSource => None,
            Answer::Lost => {
                if of.0 < HOLDERS {
                    state.holders[of.0] = Holder::Done;
                    // When the numbers of an epoch are used up, its leases end.
                    let may_end = is_of_last_epoch || state.past.has_ended(request.id);
                    if state.losses == 0 && !may_end {
                        state.past.breaks(Promise::Stands);
                    }
                }
                None
            }
        }
    }

    fn take_epoch(&self, state: &mut State, request: &Request, blank: Blank) -> Phase {
        let issuer = &mut state.issuers[usize::from(request.issuer)];
        let application = self.application(request.issuer);
        let database = &mut state.databases[application];
        let at_least = blank.epoch + 1;
        let mut taken = || database.next_epoch(at_least, self.rules);
        let epoch = if self.rules.has(Rule::NotAhead) {
            taken()
        } else {
            let epoch = issuer.ahead.take().filter(|epoch| *epoch >= at_least);
            let epoch = epoch.unwrap_or_else(&mut taken);
            issuer.ahead = Some(taken());
            epoch
        };
        issuer.reported = issuer.reported.max(epoch);
        let highest = &mut state.past.granted_epochs[application];
        *highest = (*highest).max(epoch);
        Phase::HasEpoch(blank, epoch)
    }

    fn begin_epoch(&self, state: &mut State, request: &Request, blank: Blank, epoch: u8) -> Phase {
        let issuer = &state.issuers[usize::from(request.issuer)];
        let (server, seen) = (issuer.server, issuer.seen);
        let call = self.call(request, seen, false);
        if self.script(state, server).begin_epoch(call, blank, epoch) {
            state.past.begun = state.past.begun.max(epoch);
        }
        Phase::Sent {
            seen,
            replaces: false,
        }
    }

    fn find_master(&self, state: &mut State, request: &Request) -> Phase {
        let issuer = &mut state.issuers[usize::from(request.issuer)];
        if self.rules.has(Rule::FindMaster) {
            issuer.server = state.master;
        }
        Phase::Sent {
            seen: issuer.seen,
            replaces: true,
        }
    }

    /// Answers a grant, after the database has recorded its epoch.
    fn answer(&self, state: &mut State, of: Of, request: &Request, grant: Grant) -> Option<Phase> {
        let issuer = &mut state.issuers[usize::from(request.issuer)];
        let epoch = grant.place.0;
        issuer.seen = issuer.seen.max(grant.place);
        let keeps_token = matches!(request.kind, Kind::Renew { new_token: false });
        if !keeps_token && issuer.reported < epoch {
            let database = &mut state.databases[self.application(request.issuer)];
            let alive = database.report_epoch(epoch, self.rules);
            issuer.reported = epoch;
            if alive > epoch {
                // The epoch is no longer valid.
                issuer.seen = issuer.seen.max((alive - 1, self.numbers - 1));
                return Some(Phase::Sent {
                    seen: issuer.seen,
                    replaces: false,
                });
            }
        }
        if of.0 < HOLDERS {
            state.holders[of.0] = Holder::Holds(grant.token);
            self.judge(state, request, grant);
        }
        None
    }

    /// Returns the highest token for the resource of this lease that was returned to a client.
    fn highest(&self, state: &State, id: u8) -> u8 {
        let mut answered = state.past.answered.iter().rev();
        let last = answered.find(|(_, other)| self.compare(*other, id));
        last.map_or(0, |(token, _)| *token)
    }

    /// Checks a grant against the promises, and records it.
    fn judge(&self, state: &mut State, request: &Request, grant: Grant) {
        let Grant { token, server, .. } = grant;
        let past = &mut state.past;
        let others = |(other, id): &(u8, u8)| {
            *other == token && *id != request.id && self.compare(*id, request.id)
        };
        if past.answered.iter().any(others) {
            past.breaks(Promise::Distinct);
        }
        if grant.by_master && token < request.after {
            past.breaks(match request.kind {
                Kind::Acquire => Promise::Later,
                _ => Promise::StaysSuperseded,
            });
        }
        if server == 1 {
            past.first_of_new.get_or_insert(token);
        }
        if server == 0 && !grant.by_master && past.first_of_new.is_some_and(|first| first < token) {
            past.breaks(Promise::Superseded);
        }
        if grant.place.0 > past.granted_epochs[self.application(request.issuer)] {
            past.breaks(Promise::OwnEpochs);
        }
        let answered = (token, request.id);
        if let Err(place) = past.answered.binary_search(&answered) {
            past.answered.insert(place, answered);
        }
    }

    fn call(&self, request: &Request, seen: Place, replaces: bool) -> Call {
        Call {
            resource: self.resource(request.id),
            id: request.id,
            source: u8::try_from(self.application(request.issuer))
                .expect("there are at most two applications"),
            seen,
            replaces,
        }
    }

    fn script<'a>(&'a self, state: &'a mut State, server: u8) -> Script<'a> {
        Script {
            server: &mut state.servers[usize::from(server)],
            incarnations: &mut state.incarnations,
            world: self,
        }
    }
}
