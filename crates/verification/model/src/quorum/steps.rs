//! What each step does.

use super::{
    Quorum,
    client::{Before, Choice, Counted, choose, most},
    rules::Rule,
    server::{Answer, Key, Sender, Token},
    state::State,
    step::{At, Nodes, Of, Step},
};

impl Quorum {
    /// The state after a step, and what a script has answered. Nothing where the step cannot be taken.
    pub fn step(&self, state: &State, step: Step) -> Option<(State, Answer)> {
        let mut next = state.clone();
        let answer = match step {
            Step::Take(Of(request, of), at, expired) => {
                if expired {
                    next.server_mut(at)?.keys[of.resource].take()?;
                }
                self.take(&mut next, request, at)?
            }
            Step::Choose(Of(request, _), nodes) => self.choose(&mut next, request, nodes)?,
            Step::Seal(Of(request, _), at) => self.seal(&mut next, request, at)?,
            Step::CleanUp(Of(request, _), at) => self.clean_up(&mut next, request, at)?,
            Step::AskAhead(Of(request, _)) => {
                next.epoch += 1;
                next.requests[request].ahead = Some(next.epoch);
                Answer::None
            }
            Step::Renew(renewal, lease, at) => self.renew(&mut next, renewal, lease, at)?,
            Step::Look(release, lease, at) => {
                let answer = next.server(at)?.look(0);
                if let Answer::Found(key) = answer
                    && key.lease == lease
                {
                    next.nodes[at.node].found[release] = Some(key);
                }
                answer
            }
            Step::End(release, _, at) => self.end(&mut next, release, at)?,
            Step::Expire(resource, at) => {
                next.server_mut(at)?.keys[resource].take()?;
                Answer::None
            }
            _ => fault(&mut next, step)?,
        };
        next.nodes.sort();
        Some((next, answer))
    }

    fn take(&self, state: &mut State, request: usize, at: At) -> Option<Answer> {
        let only_mine = self.bounds.requests[request].only_mine();
        let (rules, sender) = (self.rules, self.sender(request));
        let before = self.before(state, request);
        let answer = state.server_mut(at)?.take(rules, sender, only_mine);
        let Answer::Taken(taken) = answer else {
            return Some(answer);
        };
        let progress = &mut state.requests[request];
        progress.before.get_or_insert(before);
        let has_chosen = progress.choice.is_some();
        if let Some(earlier) = self.bounds.requests[request].instead_of {
            state.requests[earlier].over = true;
        }
        let asked = &mut state.nodes[at.node].asked[request];
        if !asked.ran && !has_chosen || !rules.has(Rule::SealWhereCounted) {
            asked.taken = Some(taken);
        }
        let is_late = asked.ran || has_chosen;
        asked.ran = true;
        state.spent.late_takes += u8::from(is_late);
        Some(answer)
    }

    /// What has been answered up to now.
    fn before(&self, state: &State, request: usize) -> Before {
        let request = self.bounds.requests[request];
        self.answered(state, request.lease, request.resource)
    }

    pub(super) fn answered(&self, state: &State, lease: u8, resource: usize) -> Before {
        let mut before = Before {
            seen: state.seen,
            ..Before::default()
        };
        for (of, progress) in self.bounds.requests.iter().zip(&state.requests) {
            let (granted, choice) = (progress.granted, progress.choice);
            if of.resource != resource {
                continue;
            } else if of.lease == lease {
                before.own = before.own.max(granted.unwrap_or_default());
            } else if granted.is_some() {
                // Where a token was raised for its lease, the clocks have not counted as far.
                let count = choice.map(|choice| choice.count);
                before.others = before.others.max(count.unwrap_or_default());
            }
        }
        for (of, renewal) in self.bounds.renewals.iter().zip(&state.renewals) {
            if *of == lease && resource == 0 {
                before.own = before.own.max(renewal.renewed.unwrap_or_default());
            }
        }
        before
    }

    fn choose(&self, state: &mut State, request: usize, of: Nodes) -> Option<Answer> {
        let nodes = state.nodes.iter().enumerate();
        let taken = nodes.filter(|(node, _)| of.has(*node));
        let taken: Option<Vec<_>> = taken.map(|(_, node)| node.asked[request].taken).collect();
        let taken = taken.filter(|taken| taken.len() >= self.majority())?;
        let progress = state.requests[request];
        let counted = Counted {
            taken: &taken,
            majority: self.majority(),
            seen: progress.before?.seen,
            is_over: self.bounds.requests[request].instead_of.is_some(),
            ahead: progress.ahead,
        };
        let epoch = &mut state.epoch;
        let next_epoch = |known: u8| {
            *epoch = known.max(*epoch) + 1;
            *epoch
        };
        let mut choice = choose(
            self.rules,
            self.bounds.requests[request].wish,
            &counted,
            next_epoch,
        );
        let of_request = self.bounds.requests[request];
        let earlier = self.bounds.requests.iter().zip(&state.requests);
        let earlier = earlier.filter(|(other, _)| {
            (other.lease, other.resource) == (of_request.lease, of_request.resource)
        });
        let chosen = earlier
            .filter_map(|(_, progress)| progress.choice)
            .map(|choice| choice.token);
        let is_followed = chosen.max() < progress.before.map(|before| before.others);
        choice.revives = of_request.only_mine() && is_followed;
        let is_granted = choice.is_stored || !self.rules.has(Rule::Seal);
        for (node, other) in state.nodes.iter_mut().enumerate() {
            let asked = &mut other.asked[request];
            let is_counted = of.has(node) && !choice.is_stored;
            // Of what was answered, the stamp is of use still.
            asked.taken = asked.taken.filter(|_| is_counted);
            if let Some(taken) = &mut asked.taken {
                (taken.usable, taken.counted, taken.stored) = (false, Token::default(), None);
            }
        }
        state.requests[request].choice = Some(choice);
        if is_granted {
            self.grant(state, request, choice);
        }
        Some(Answer::None)
    }

    fn grant(&self, state: &mut State, request: usize, choice: Choice) {
        state.requests[request].granted = Some(choice.token);
        if self.bounds.remembers {
            state.seen = state.seen.max(choice.count);
        }
    }

    fn seal(&self, state: &mut State, request: usize, at: At) -> Option<Answer> {
        let choice = state.choice(request).filter(|choice| !choice.is_stored)?;
        let taken = state.nodes[at.node].asked[request].taken?;
        let (rules, sender) = (self.rules, self.sender(request));
        let standing = self.standing(state, sender.resource, at);
        let tokens = (choice.token, choice.count);
        let answer = state
            .server_mut(at)?
            .seal(rules, sender, taken.stamp, tokens);
        if answer != Answer::Sealed {
            return Some(answer);
        }
        // A newer request for a lease may give it another token, but no older one.
        if let Some((grant, key)) = standing
            && key.lease == sender.lease
            && request < grant
        {
            state.ended_live = true;
        }
        state.nodes[at.node].asked[request].is_sealed = true;
        let sealed = state
            .nodes
            .iter()
            .filter(|node| node.asked[request].is_sealed);
        let enough = match rules.has(Rule::SealOnMajority) {
            true => self.majority(),
            false => 1,
        };
        let progress = state.requests[request];
        if sealed.count() >= enough && progress.granted.is_none() && !progress.over {
            self.grant(state, request, choice);
        }
        Some(answer)
    }

    /// The request whose lease stands, and its key on this node.
    fn standing(&self, state: &State, resource: usize, at: At) -> Option<(usize, Key)> {
        let server = state.server(at)?;
        let key = server.keys[resource].filter(|key| key.stamp.history == server.history)?;
        let node = &state.nodes[at.node];
        let requests = self.bounds.requests.iter().enumerate();
        let stands = requests.rev().find(|(n, of)| {
            let granted = state.requests[*n].granted;
            of.resource == resource
                && of.lease == key.lease
                && node.asked[*n].is_sealed
                && granted.is_some()
                && granted == key.token
        });
        stands.map(|(n, _)| (n, key))
    }

    fn clean_up(&self, state: &mut State, request: usize, at: At) -> Option<Answer> {
        let sender = self.sender(request);
        let left = self.left(state, request, at);
        let standing = self.standing(state, sender.resource, at);
        let answer = state.server_mut(at)?.abandon(self.rules, sender, left);
        state.requests[request].over = true;
        if answer == Answer::Ended && standing.is_some() {
            state.ended_live = true;
        }
        Some(answer)
    }

    /// The token that a request may have stored on this server: it was sent to those whose clocks were counted.
    pub fn left(&self, state: &State, request: usize, at: At) -> Option<Token> {
        let choice = state.choice(request)?;
        let is_sent = state.nodes[at.node].asked[request].taken.is_some();
        let anywhere = !self.rules.has(Rule::CleanUpWhereSealed);
        (is_sent || anywhere).then_some(choice.token)
    }

    fn renew(&self, state: &mut State, renewal: usize, lease: u8, at: At) -> Option<Answer> {
        let rules = self.rules;
        let known = self.answered(state, lease, 0);
        let before = *state.renewals[renewal].before.get_or_insert(known);
        let sender = Sender {
            lease,
            attempt: 0,
            resource: 0,
        };
        let answer = state.server_mut(at)?.renew(rules, sender, known.own);
        let Answer::Renewed(renewed) = answer else {
            // As if it had not been sent.
            state.renewals[renewal].before = state.renewals[renewal].before.filter(|_| {
                state
                    .nodes
                    .iter()
                    .any(|node| node.renewed[renewal].is_some())
            });
            return Some(answer);
        };
        state.nodes[at.node].renewed[renewal] = Some(renewed);
        let renewed: Vec<_> = state
            .nodes
            .iter()
            .filter_map(|node| node.renewed[renewal])
            .collect();
        let tokens: Vec<_> = renewed.iter().map(|renewed| renewed.token).collect();
        let any = !rules.has(Rule::RenewalNeedsToken) || !rules.has(Rule::RenewalNeedsSameToken);
        let token = match any {
            true => Some(known.own).filter(|_| tokens.len() >= self.majority()),
            false => most(&tokens, self.majority()),
        };
        let Some(token) = token else {
            return Some(answer);
        };
        let usable = renewed.iter().filter(|renewed| renewed.usable);
        let mut counted: Vec<_> = usable.map(|renewed| renewed.counted).collect();
        counted.sort_unstable_by(|one, other| other.cmp(one));
        if counted.first().is_none_or(|highest| *highest < before.seen) {
            let has_lost = state.spent.restarts + state.spent.flushes + state.spent.evictions > 0;
            state.lost_live |= !has_lost;
            return Some(answer);
        }
        state.renewals[renewal].renewed = Some(token);
        let remembered = match rules.has(Rule::CountOfMajority) {
            true => self.majority() - 1,
            false => 0,
        };
        if let Some(count) = counted.get(remembered).filter(|_| self.bounds.remembers) {
            state.seen = state.seen.max(*count);
        }
        Some(answer)
    }

    fn end(&self, state: &mut State, release: usize, at: At) -> Option<Answer> {
        let found = state.nodes[at.node].found[release]?;
        let standing = self.standing(state, 0, at);
        let answer = state.server_mut(at)?.end_found(self.rules, 0, found);
        if let (Answer::Ended, Some((_, key))) = (answer, standing) {
            state.ended_live |= key.token != found.token;
        }
        Some(answer)
    }

    /// Who sends the scripts of a request.
    pub fn sender(&self, request: usize) -> Sender {
        let of = self.bounds.requests[request];
        let attempt = match of.instead_of.filter(|_| !self.rules.has(Rule::OneChoice)) {
            Some(earlier) => self.bounds.requests[earlier].attempt,
            None => of.attempt,
        };
        Sender {
            lease: of.lease,
            attempt,
            resource: of.resource,
        }
    }

    pub(super) fn majority(&self) -> usize {
        self.bounds.nodes / 2 + 1
    }
}

/// What nodes lose.
fn fault(state: &mut State, step: Step) -> Option<Answer> {
    let spent = &mut state.spent;
    match step {
        Step::Evict(at) => {
            spent.evictions += 1;
            state.server_mut(at)?.clock.take()?;
        }
        Step::Flush(at) => {
            spent.flushes += 1;
            let server = state.server_mut(at)?;
            (server.clock, server.keys) = (None, [None; 2]);
        }
        Step::Save(at) => {
            spent.saves += 1;
            let saved = *state.server(at)?;
            state.nodes[at.node].saved = Some(saved);
        }
        Step::RestartEmpty(at) => {
            spent.restarts += 1;
            state.server_mut(at)?.restart(None);
        }
        Step::RestartFromDisk(at) => {
            spent.restarts += 1;
            let saved = state.nodes[at.node].saved.take()?;
            state.server_mut(at)?.restart(Some(saved));
        }
        Step::Promote(at) => {
            let promoted = state.server(at)?.promoted();
            state.nodes[at.node].twin = Some(promoted);
        }
        _ => return None,
    }
    Some(Answer::None)
}
