//! A request at an issuer that announces its grants.

use super::{
    LastWord, Promise, Rule, Step,
    database::Announcement,
    state::{HOLDERS, Held, Holder, Kind, Of, Phase, Request, Server, State},
};

/// The maximum number of higher tokens that a request takes.
pub(super) const ATTEMPTS: u8 = 3;

impl LastWord {
    /// Lists the requests that a holder may send.
    pub(super) fn asks(&self, state: &State, holder: usize, steps: &mut Vec<Step>) {
        // The issuers are interchangeable, so the first request goes to the first issuer.
        let first = state.holders[0] == Holder::New;
        let issuers = if first { 1 } else { self.issuers };
        let of = Of(holder);
        for issuer in 0..issuers {
            let mut ask = |kind| steps.push(Step::Ask(kind, of, issuer));
            match state.holders[holder] {
                Holder::New | Holder::Asks => {
                    // A holder whose grant was not answered acquires the lease once more.
                    if usize::from(state.grants) <= self.holders {
                        ask(Kind::Acquire);
                    }
                }
                Holder::Holds(_) => {
                    let new_tokens = state.new_tokens < self.new_tokens;
                    Kind::of_holder(self.releases, self.renewals, new_tokens).for_each(ask);
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

    /// Takes the next step of a request. If it answers at once, the lease is not checked again.
    pub(super) fn go_on(&self, state: &mut State, of: Of, at_once: bool) {
        let mut request = state.requests[of.0]
            .take()
            .expect("the request is in progress");
        let next = match request.phase {
            Phase::Sent if self.one_database => self.run_in_database(state, of, &request),
            Phase::Sent => self.run_script(state, of, &request),
            Phase::Took(token) => self.announce(state, of, &request, token),
            Phase::Superseded(next) => {
                request.higher += 1;
                self.take_higher(state, of, &request, next)
            }
            Phase::Announced(token) if at_once => self.answer(state, of, &request, token),
            Phase::Announced(token) => self.confirm(state, of, &request, token),
            Phase::Lost => self.release_lost(state, of, &request),
        };
        state.requests[of.0] = next.map(|phase| Request { phase, ..request });
    }

    /// Grants, renews or releases a lease in the store.
    fn run_script(&self, state: &mut State, of: Of, request: &Request) -> Option<Phase> {
        let server = server_of(state, request);
        let held = server.lease.filter(|(id, _)| *id == request.id);
        let token = match (request.kind, held) {
            (Kind::Release, _) => {
                server.lease.take_if(|(id, _)| *id == request.id);
                return None;
            }
            // The holder retries, or gives up.
            (Kind::Acquire, None) if server.lease.is_some() => return None,
            (Kind::Acquire, None) => {
                let token = server.take(request.id, 0);
                state.grants += 1;
                token
            }
            (Kind::Renew { .. }, None) => return Self::is_lost(state, of),
            // A foreign token does not move the counter, so the new token may be above the counter.
            (Kind::Renew { new_token: true }, Some((id, token))) => server.take(id, token + 1),
            (Kind::Acquire | Kind::Renew { .. }, Some((_, token))) => token,
        };
        match self.needs_no_announcement(state, request, token) {
            true => self.answer(state, of, request, token),
            false => Some(Phase::Took(token)),
        }
    }

    /// Executes a whole request on a lease in the database of the fence. A grant and its
    /// announcement are one transaction, and the row of the fence is the token counter.
    fn run_in_database(&self, state: &mut State, of: Of, request: &Request) -> Option<Phase> {
        let row = &state.database;
        let (max_token, announced) = (row.max_token, (row.announced, row.lease));
        // A higher token has been used since the announcement.
        let has_ended = row.announced > 0 && row.lease.is_none();
        let next = row.seen() + 1;
        let lease = &mut server_of(state, request).lease;
        let held = lease.filter(|(id, _)| *id == request.id);
        let token = match (request.kind, held) {
            (Kind::Release, _) => {
                lease.take_if(|(id, _)| *id == request.id);
                return None;
            }
            (Kind::Acquire, None) if lease.is_some() => return None,
            (Kind::Acquire, None) => {
                state.grants += 1;
                next
            }
            // A token that is used up is not valid for a further write.
            (Kind::Acquire, Some((_, token))) if token <= max_token => next,
            (Kind::Acquire, Some((_, token))) => token,
            (Kind::Renew { .. }, None) => return Self::is_lost(state, of),
            (Kind::Renew { new_token }, Some((id, token))) => {
                let was_last = announced == (token, Some(id));
                if max_token + u8::from(has_ended) > token || new_token && !was_last {
                    *lease = None;
                    if Self::no_fault(state) && self.abandoned == 0 {
                        state.past.breaks(Promise::Stands);
                    }
                    return Self::is_lost(state, of);
                }
                if new_token { next } else { token }
            }
        };
        if token == next {
            server_of(state, request).lease = Some((request.id, token));
            state.database.grant(token, request.id, self.rules);
            state.disk = state.database.clone();
        }
        self.answer(state, of, request, token)
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

    fn announce(&self, state: &mut State, of: Of, request: &Request, token: u8) -> Option<Phase> {
        let renews = matches!(request.kind, Kind::Renew { .. });
        let announcement = state
            .database
            .announce(token, request.id, renews, self.rules);
        if self.rules.has(Rule::OnDisk) {
            state.disk = state.database.clone();
        }
        match announcement {
            Announcement::Announced => Some(Phase::Announced(token)),
            Announcement::Superseded { next, was_last } => match request.kind {
                Kind::Renew { new_token: false } if was_last && next == token + 1 => {
                    self.answer(state, of, request, token)
                }
                Kind::Renew { .. } => Some(Phase::Lost),
                // Without this rule, the database grants the higher token.
                _ if !self.rules.has(Rule::OfTheStore) => {
                    state.database.grant(next, request.id, self.rules);
                    Some(Phase::Announced(next))
                }
                _ if self.rules.has(Rule::Lift) && request.higher < ATTEMPTS => {
                    Some(Phase::Superseded(next))
                }
                // The request fails.
                _ => None,
            },
        }
    }

    /// Takes a token from the store that is above all tokens that the fence has received.
    fn take_higher(&self, state: &mut State, of: Of, request: &Request, next: u8) -> Option<Phase> {
        let compares = self.rules.has(Rule::LiftCompares);
        let server = server_of(state, request);
        let Some((id, _)) = server
            .lease
            .filter(|(id, _)| !compares || *id == request.id)
        else {
            return Self::is_lost(state, of);
        };
        let token = server.take(id, next);
        if !self.rules.has(Rule::CounterStays) {
            server.counter = token;
        }
        Some(Phase::Took(token))
    }

    /// Checks again that the lease is still held, and answers.
    fn confirm(&self, state: &mut State, of: Of, request: &Request, token: u8) -> Option<Phase> {
        let server = server_of(state, request);
        match server.lease.filter(|(id, _)| *id == request.id) {
            None => Self::is_lost(state, of),
            Some((id, _)) if !self.rules.has(Rule::OfTheStore) => {
                server.lease = Some((id, token));
                self.answer(state, of, request, token)
            }
            Some((_, now)) if now == token => self.answer(state, of, request, token),
            Some((_, now)) => Some(Phase::Took(now)),
        }
    }

    fn release_lost(&self, state: &mut State, of: Of, request: &Request) -> Option<Phase> {
        let server = server_of(state, request);
        let stood = server.lease.take_if(|(id, _)| *id == request.id).is_some();
        // A holder that has sent two requests may supersede itself.
        if stood && Self::no_fault(state) && self.abandoned == 0 {
            state.past.breaks(Promise::Stands);
        }
        Self::is_lost(state, of)
    }

    /// Ends a request whose lease is lost. A holder that was acquiring the lease may retry.
    fn is_lost(state: &mut State, Of(holder): Of) -> Option<Phase> {
        if let Some(holder @ Holder::Holds(_)) = state.holders.get_mut(holder) {
            *holder = Holder::Done;
        }
        None
    }

    /// Answers a request, which ends.
    fn answer(&self, state: &mut State, of: Of, request: &Request, token: u8) -> Option<Phase> {
        let issuer = &mut state.issuers[usize::from(request.issuer)];
        issuer.announced[usize::from(request.id)] = Some(token);
        if of.0 == HOLDERS {
            return None;
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
        None
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

fn server_of<'a>(state: &'a mut State, request: &Request) -> &'a mut Server {
    let server = state.issuers[usize::from(request.issuer)].server;
    &mut state.servers[usize::from(server)]
}
