//! A request at an issuer that announces its grants.

use super::{
    LastWord, Step,
    database::Announcement,
    rules::{Promise, Rule},
    state::{HOLDERS, Held, Holder, Kind, Of, Phase, Request, Server, State},
};

/// The maximum number of higher tokens that a request takes.
pub(super) const ATTEMPTS: u8 = 3;

impl LastWord {
    /// Lists the requests that a holder may send.
    pub(super) fn asks(&self, state: &State, holder: usize, steps: &mut Vec<Step>) {
        // The issuers are interchangeable, so the first request goes to the first issuer.
        let first = state.holders[0] == Holder::New;
        let issuers = if first { 1 } else { self.bounds.issuers };
        let of = Of(holder);
        for issuer in 0..issuers {
            let mut ask = |kind| steps.push(Step::Ask(kind, of, issuer));
            match state.holders[holder] {
                Holder::New | Holder::Asks => {
                    // A holder whose grant was not answered acquires the lease once more.
                    if usize::from(state.grants) <= self.bounds.holders {
                        ask(Kind::Acquire);
                    }
                }
                Holder::Holds(_) => {
                    if self.bounds.releases {
                        ask(Kind::Release);
                    }
                    if self.bounds.renewals {
                        ask(Kind::Renew { new_token: false });
                    }
                    if state.new_tokens < self.bounds.new_tokens {
                        ask(Kind::Renew { new_token: true });
                    }
                }
                Holder::Done => {}
            }
        }
    }

    pub(super) fn ask(state: &mut State, Of(holder): Of, issuer: u8, kind: Kind) {
        match kind {
            Kind::Acquire => state.holders[holder] = Holder::Asks,
            Kind::Renew { new_token } => state.new_tokens += u8::from(new_token),
            Kind::Release => state.holders[holder] = Holder::Done,
        }
        state.requests[holder] = Some(Request {
            id: u8::try_from(holder).expect("there are few holders"),
            issuer,
            kind,
            phase: Phase::Sent,
            higher: 0,
            after: state.past.highest(),
        });
    }

    /// Returns the next step of a request.
    pub(super) fn goes_on(of: Of, request: &Request) -> Step {
        match request.phase {
            Phase::Sent => Step::ScriptRuns(of),
            Phase::Took(_) => Step::IsAnnounced(of),
            Phase::Superseded(_) => Step::TakesHigherToken(of),
            Phase::Announced(_) => Step::IsStillHeldAndAnswered(of),
            Phase::Lost => Step::IsReleased(of),
        }
    }

    /// Grants, renews or releases a lease in the store.
    pub(super) fn run_script(&self, state: &mut State, of: Of) {
        if self.bounds.one_database {
            return self.run_in_database(state, of);
        }
        let request = take(state, of);
        let server = server_of(state, &request);
        let took = match request.kind {
            Kind::Acquire => match server.lease {
                Some((id, token)) if id == request.id => Some(token),
                // The holder retries, or gives up.
                Some(_) => return,
                None => {
                    let token = server.take(request.id, 0);
                    state.grants += 1;
                    Some(token)
                }
            },
            Kind::Renew { new_token } => match server.lease {
                Some((id, token)) if id == request.id => Some(match new_token {
                    false => token,
                    // A foreign token does not move the counter, so the new token may be above the
                    // counter.
                    true => server.take(id, token + 1),
                }),
                _ => None,
            },
            Kind::Release => {
                server.lease.take_if(|(id, _)| *id == request.id);
                return;
            }
        };
        let Some(token) = took else {
            return Self::is_lost(state, of);
        };
        if self.needs_no_announcement(state, &request, token) {
            return self.answer(state, of, &request, token);
        }
        put(state, of, Phase::Took(token), request);
    }

    fn needs_no_announcement(&self, state: &State, request: &Request, token: u8) -> bool {
        let issuer = &state.issuers[usize::from(request.issuer)];
        match request.kind {
            Kind::Acquire => !self.rules.has(Rule::Announce),
            Kind::Renew { new_token: true } => !self.rules.has(Rule::NewToken),
            Kind::Renew { new_token: false } => {
                !self.rules.has(Rule::OfOthers)
                    || issuer.announced[usize::from(request.id)] == Some(token)
            }
            Kind::Release => unreachable!("a release takes no token"),
        }
    }

    pub(super) fn announce(&self, state: &mut State, of: Of) {
        let request = take(state, of);
        let Phase::Took(token) = request.phase else {
            unreachable!("the request has taken a token");
        };
        let renews = matches!(request.kind, Kind::Renew { .. });
        let announcement = state
            .database
            .announce(token, request.id, renews, self.rules);
        if self.rules.has(Rule::OnDisk) {
            state.disk = state.database.clone();
        }
        let phase = match announcement {
            Announcement::Announced => Phase::Announced(token),
            Announcement::Superseded { next, was_last } => match request.kind {
                Kind::Renew { new_token: false } if was_last && next == token + 1 => {
                    return self.answer(state, of, &request, token);
                }
                Kind::Renew { .. } => Phase::Lost,
                // Without this rule, the database grants the higher token.
                _ if !self.rules.has(Rule::OfTheStore) => {
                    state.database.grant(next, request.id, self.rules);
                    Phase::Announced(next)
                }
                _ if self.rules.has(Rule::Lift) && request.higher < ATTEMPTS => {
                    Phase::Superseded(next)
                }
                // The request fails.
                _ => return,
            },
        };
        put(state, of, phase, request);
    }

    /// Takes a token from the store that is above all tokens that the fence has received.
    pub(super) fn take_higher(&self, state: &mut State, of: Of) {
        let mut request = take(state, of);
        let Phase::Superseded(next) = request.phase else {
            unreachable!("the token was superseded");
        };
        let compares = self.rules.has(Rule::LiftCompares);
        let follows = !self.rules.has(Rule::CounterStays);
        let server = server_of(state, &request);
        let Some((id, _)) = server
            .lease
            .filter(|(id, _)| !compares || *id == request.id)
        else {
            return Self::is_lost(state, of);
        };
        let token = server.take(id, next);
        if follows {
            server.counter = token;
        }
        request.higher += 1;
        put(state, of, Phase::Took(token), request);
    }

    /// Checks again that the lease is still held, and answers.
    pub(super) fn confirm(&self, state: &mut State, of: Of) {
        let request = take(state, of);
        let Phase::Announced(token) = request.phase else {
            unreachable!("the grant was announced");
        };
        let plain = !self.rules.has(Rule::OfTheStore);
        let server = server_of(state, &request);
        match server.lease.filter(|(id, _)| *id == request.id) {
            None => Self::is_lost(state, of),
            Some((id, _)) if plain => {
                server.lease = Some((id, token));
                self.answer(state, of, &request, token);
            }
            Some((_, now)) if now == token => self.answer(state, of, &request, token),
            Some((_, now)) => put(state, of, Phase::Took(now), request),
        }
    }

    /// Answers the announced grant without another check of the lease.
    pub(super) fn answer_at_once(&self, state: &mut State, of: Of) {
        let request = take(state, of);
        let Phase::Announced(token) = request.phase else {
            unreachable!("the grant was announced");
        };
        self.answer(state, of, &request, token);
    }

    pub(super) fn release_lost(&self, state: &mut State, of: Of) {
        let request = take(state, of);
        let server = server_of(state, &request);
        let stood = server.lease.take_if(|(id, _)| *id == request.id).is_some();
        // A holder that has sent two requests may supersede itself.
        if stood && Self::no_fault(state) && self.bounds.abandoned == 0 {
            state.past.breaks(Promise::Stands);
        }
        Self::is_lost(state, of);
    }

    /// Records that the holder has lost its lease. A holder that was acquiring the lease may retry.
    pub(super) fn is_lost(state: &mut State, Of(holder): Of) {
        if let Some(holder @ Holder::Holds(_)) = state.holders.get_mut(holder) {
            *holder = Holder::Done;
        }
    }

    pub(super) fn answer(&self, state: &mut State, of: Of, request: &Request, token: u8) {
        let issuer = &mut state.issuers[usize::from(request.issuer)];
        issuer.announced[usize::from(request.id)] = Some(token);
        if of.0 == HOLDERS {
            return;
        }
        let new = Held {
            id: request.id,
            token,
            read: None,
            used: false,
            in_doubt: false,
        };
        state.holders[of.0] = Holder::Holds(match state.holders[of.0] {
            // If the token is the same, the earlier read of the holder is still valid.
            Holder::Holds(held) if held.token == token => held,
            Holder::Holds(held) => Held {
                read: held.read,
                ..new
            },
            _ => new,
        });
        let past = &mut state.past;
        let other = |(other, id): &(u8, u8)| *other == token && *id != request.id;
        if past.answered.iter().any(other) {
            past.breaks(Promise::Distinct);
        }
        if request.kind == Kind::Acquire && token < request.after {
            past.breaks(Promise::Later);
        }
        let answered = (token, request.id);
        if let Err(place) = past.answered.binary_search(&answered) {
            past.answered.insert(place, answered);
        }
    }

    pub(super) fn no_fault(state: &State) -> bool {
        state.losses == 0 && state.forged == 0
    }
}

impl Server {
    /// Gives a lease the next token, or `lowest` if that is higher.
    fn take(&mut self, id: u8, lowest: u8) -> u8 {
        self.counter += 1;
        let token = self.counter.max(lowest);
        self.lease = Some((id, token));
        token
    }
}

pub(super) fn take(state: &mut State, of: Of) -> Request {
    state.requests[of.0]
        .take()
        .expect("the request is in progress")
}

fn put(state: &mut State, of: Of, phase: Phase, request: Request) {
    state.requests[of.0] = Some(Request { phase, ..request });
}

pub(super) fn server_of<'a>(state: &'a mut State, request: &Request) -> &'a mut Server {
    let server = state.issuers[usize::from(request.issuer)].server;
    &mut state.servers[usize::from(server)]
}
