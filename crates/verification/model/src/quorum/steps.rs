//! The effects of the steps.

use super::{
    At, Nodes, Of, Rule, Step,
    bounds::Quorum,
    client::{Before, Choice, Counted, Next, choose, most},
    server::{Answer, Key, Sender, Token},
    state::{Holder, State},
};

impl Quorum {
    /// Returns the state after a step, and the answer of its script; `None` if the step is not
    /// possible.
    pub fn step(&self, state: &State, step: Step) -> Option<(State, Answer)> {
        let mut next = state.clone();
        let answer = match step {
            Step::Take(Of(request, of), at, expired) => {
                if expired {
                    next.server_mut(at)?.keys[of.resource].take()?;
                }
                self.take(&mut next, request, at)?
            }
            Step::Begin(Of(request, _), at) => {
                let blank = next.nodes[at.node].asked[request].blank.take()?;
                let epoch = next.requests[request].epoch?;
                next.server_mut(at)?.begin(blank, epoch)
            }
            Step::Choose(Of(request, _), nodes) => self.choose(&mut next, request, nodes)?,
            Step::Seal(Of(request, _), at) => self.seal(&mut next, request, at)?,
            Step::CleanUp(Of(request, _), at) => self.clean_up(&mut next, request, at)?,
            Step::Renew(renewal, lease, at) => self.renew(&mut next, renewal, lease, at)?,
            Step::Release(release, lease, at) => self.release(&mut next, release, lease, at)?,
            Step::ReadKey(ended, lease, at) => {
                let answer = next.server(at)?.read_key(0);
                if let Answer::Found(key) = answer
                    && key.lease == lease
                {
                    next.nodes[at.node].found[ended] = Some(key);
                }
                answer
            }
            Step::End(ended, _, at) => self.end(&mut next, ended, at)?,
            Step::Expire(resource, at) => {
                next.server_mut(at)?.keys[resource].take()?;
                Answer::None
            }
            _ => fault(&mut next, step)?,
        };
        next.forget_epochs();
        Some((next, answer))
    }

    fn take(&self, state: &mut State, request: usize, at: At) -> Option<Answer> {
        let of = self.requests[request];
        let (rules, sender) = (self.rules, self.sender(request));
        let before = self.before(state, request);
        let holder = self.named(state, request);
        let standing = self.standing(state, sender.resource, at);
        let server = state.server_mut(at)?;
        let answer = match of.only_mine() {
            true => server.retake(rules, sender, holder?.token),
            false => server.take(rules, sender, self.proposal(request)),
        };
        let Answer::Taken(taken) = answer else {
            return Some(answer);
        };
        if standing.is_some_and(|(_, key)| key.lease != sender.lease) {
            state.ended_live = true;
        }
        let progress = &mut state.requests[request];
        progress.before.get_or_insert(before);
        progress.holder = holder;
        let has_chosen = progress.choice.is_some();
        if let Some(earlier) = of.instead_of {
            state.requests[earlier].over = true;
        }
        let asked = &mut state.nodes[at.node].asked[request];
        let is_late = asked.ran || has_chosen;
        if !is_late {
            asked.taken = Some(taken);
        }
        if taken.is_sealed {
            asked.first = taken.token;
        }
        asked.ran = true;
        state.spent.late_takes += u8::from(is_late);
        if !rules.has(Rule::LateAnswers) && has_chosen && taken.is_sealed {
            let nodes = state.nodes.iter().map(|node| node.asked[request].first);
            let same = nodes.filter(|first| *first == taken.token).count();
            let progress = &mut state.requests[request];
            if same >= self.majority() && progress.granted.is_none() && !progress.over {
                progress.granted = taken.token;
            }
        }
        Some(answer)
    }

    /// Returns the highest tokens that were returned to clients until now.
    fn before(&self, state: &State, request: usize) -> Before {
        let request = self.requests[request];
        self.answered(state, request.lease, request.resource)
    }

    pub(super) fn answered(&self, state: &State, lease: u8, resource: usize) -> Before {
        let mut before = Before {
            seen: state.seen,
            ..Before::default()
        };
        for (of, progress) in self.requests.iter().zip(&state.requests) {
            let (granted, choice) = (progress.granted, progress.choice);
            if of.resource != resource {
                continue;
            } else if of.lease == lease {
                before.own = before.own.max(granted.unwrap_or_default());
            } else if granted.is_some() {
                // A token that was raised for its lease is above the counters, so its count is
                // compared instead.
                let count = choice.map(|choice| choice.count);
                before.others = before.others.max(count.unwrap_or_default());
            }
        }
        for (of, renewal) in self.renewals.iter().zip(&state.renewals) {
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
        let of_request = self.requests[request];
        let counted = Counted {
            taken: &taken,
            majority: self.majority(),
            seen: progress.before?.seen,
            is_over: of_request.instead_of.is_some() && !progress.has_epoch,
        };
        let mut choice = match choose(
            self.rules,
            of_request.wish,
            self.proposal(request),
            &counted,
        ) {
            Next::Chooses(choice) => choice,
            Next::NeedsEpoch(_) if progress.has_epoch => return None,
            Next::NeedsEpoch(known) => {
                self.begin_epoch(state, request, of, known);
                return Some(Answer::None);
            }
        };
        let earlier = self.requests.iter().zip(&state.requests);
        let earlier = earlier.filter(|(other, _)| {
            (other.lease, other.resource) == (of_request.lease, of_request.resource)
        });
        let chosen = earlier
            .filter_map(|(_, progress)| progress.choice)
            .map(|choice| choice.token);
        let is_followed = chosen.max() < progress.before.map(|before| before.others);
        choice.renews_superseded = of_request.only_mine() && is_followed;
        let is_granted = choice.is_stored || !self.rules.has(Rule::Seal);
        for (node, other) in state.nodes.iter_mut().enumerate() {
            let asked = &mut other.asked[request];
            let is_counted = of.has(node) && !choice.is_stored;
            // Only the stamps in the answers still have an effect.
            asked.taken = asked.taken.filter(|_| is_counted);
            if let Some(taken) = &mut asked.taken {
                (taken.usable, taken.counted, taken.token) = (false, Token::default(), None);
            }
        }
        state.requests[request].choice = Some(choice);
        if is_granted {
            self.grant(state, request, choice);
        }
        Some(Answer::None)
    }

    /// Takes an epoch for the counters that the takes have returned. The request then takes the
    /// keys again.
    fn begin_epoch(&self, state: &mut State, request: usize, of: Nodes, known: u8) {
        let from = match self.rules.has(Rule::EpochFromDatabase) {
            true => known.max(state.epoch),
            false => known,
        };
        state.epoch = state.epoch.max(from + 1);
        state.requests[request].epoch = Some(from + 1);
        state.requests[request].has_epoch = true;
        for (node, other) in state.nodes.iter_mut().enumerate() {
            let asked = &mut other.asked[request];
            let taken = asked.taken.take().filter(|_| of.has(node));
            asked.blank = taken.map(|taken| (taken.stamp.replication_id, taken.incarnation));
            (asked.ran, asked.first) = (false, None);
        }
    }

    fn grant(&self, state: &mut State, request: usize, choice: Choice) {
        state.requests[request].granted = Some(choice.token);
        if self.caches_count {
            state.seen = state.seen.max(choice.count);
        }
    }

    fn seal(&self, state: &mut State, request: usize, at: At) -> Option<Answer> {
        let choice = state.requests[request]
            .choice
            .filter(|choice| !choice.is_stored)?;
        let taken = state.nodes[at.node].asked[request].taken?;
        let (rules, sender) = (self.rules, self.sender(request));
        let standing = self.standing(state, sender.resource, at);
        let tokens = (choice.token, choice.count);
        let replaced = state.requests[request].holder.map(|holder| holder.token);
        let answer = state
            .server_mut(at)?
            .seal(rules, sender, taken.stamp, tokens, replaced);
        if answer != Answer::Sealed {
            return Some(answer);
        }
        // A newer request for a lease may give it another token; an older request may not.
        if let Some((grant, key)) = standing
            && key.lease == sender.lease
            && request < grant
        {
            state.ended_live = true;
        }
        state.nodes[at.node].asked[request].is_sealed = true;
        let apart = rules.has(Rule::TripsApart);
        let sealed = state.nodes.iter().filter(|node| {
            let asked = node.asked[request];
            asked.is_sealed || (asked.first.is_some() && !apart)
        });
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

    /// Returns the request whose lease is valid on this node, and its key.
    fn standing(&self, state: &State, resource: usize, at: At) -> Option<(usize, Key)> {
        let server = state.server(at)?;
        let key = server.keys[resource]
            .filter(|key| key.stamp.replication_id == server.replication_id)?;
        let node = &state.nodes[at.node];
        let requests = self.requests.iter().enumerate();
        let stands = requests.rev().find(|(n, of)| {
            let granted = state.requests[*n].granted;
            of.resource == resource
                && of.lease == key.lease
                && (node.asked[*n].is_sealed || node.asked[*n].first == granted)
                && granted.is_some()
                && granted == key.token
        });
        stands.map(|(n, _)| (n, key))
    }

    fn clean_up(&self, state: &mut State, request: usize, at: At) -> Option<Answer> {
        let sender = self.sender(request);
        let proposal = self.proposal(request);
        let standing = self.standing(state, sender.resource, at);
        let server = state.server_mut(at)?;
        let answer = server.abandon(self.rules, sender, proposal);
        state.requests[request].over = true;
        if answer == Answer::Ended && standing.is_some() {
            state.ended_live = true;
        }
        Some(answer)
    }

    /// Returns a holder's view of its lease. The lease is on the first resource.
    pub fn holder(&self, state: &State, lease: u8) -> Option<Holder> {
        let requests = self.requests.iter().zip(&state.requests);
        let granted = requests.filter_map(|(of, progress)| {
            let is_its = of.lease == lease && of.resource == 0;
            Some(Holder {
                token: progress.granted.filter(|_| is_its)?,
                attempt: of.attempt,
                ticket: of.ticket,
            })
        });
        granted.max_by_key(|holder| (holder.token, holder.attempt))
    }

    /// Returns the grant that a request for another token names; `None` for a request for a lease.
    pub fn named(&self, state: &State, request: usize) -> Option<Holder> {
        let of = self.requests[request];
        let known = state.requests[request].holder;
        let holder = known.or_else(|| self.holder(state, of.lease));
        holder.filter(|_| of.only_mine())
    }

    /// Returns the sender of the scripts of a holder.
    pub fn holding(&self, lease: u8, holder: Holder) -> Sender {
        Sender {
            lease,
            attempt: holder.attempt,
            ticket: holder.ticket,
            resource: 0,
        }
    }

    fn renew(&self, state: &mut State, renewal: usize, lease: u8, at: At) -> Option<Answer> {
        let rules = self.rules;
        let known = self.answered(state, lease, 0);
        let before = *state.renewals[renewal].before.get_or_insert(known);
        let holder = self.holder(state, lease)?;
        let holder = *state.renewals[renewal].holder.get_or_insert(holder);
        let sender = self.holding(lease, holder);
        let answer = state.server_mut(at)?.renew(rules, sender, holder.token);
        let Answer::Renewed(renewed) = answer else {
            // A renewal that no node has confirmed is treated as not sent.
            let mut nodes = state.nodes.iter();
            if nodes.all(|node| node.renewed[renewal].is_none()) {
                (
                    state.renewals[renewal].before,
                    state.renewals[renewal].holder,
                ) = (None, None);
            }
            return Some(answer);
        };
        state.nodes[at.node].renewed[renewal] = Some(renewed);
        let renewed: Vec<_> = state
            .nodes
            .iter()
            .filter_map(|node| node.renewed[renewal])
            .collect();
        let tokens: Vec<_> = renewed.iter().map(|renewed| renewed.token).collect();
        let Some(token) = most(&tokens, self.majority()) else {
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
        let index = match rules.has(Rule::CountOfMajority) {
            true => self.majority() - 1,
            false => 0,
        };
        if let Some(count) = counted.get(index).filter(|_| self.caches_count) {
            state.seen = state.seen.max(*count);
        }
        Some(answer)
    }

    fn release(&self, state: &mut State, release: usize, lease: u8, at: At) -> Option<Answer> {
        let holder = match state.releases[release] {
            Some(holder) => holder,
            None => self.holder(state, lease)?,
        };
        state.releases[release] = Some(holder);
        let standing = self.standing(state, 0, at);
        let sender = self.holding(lease, holder);
        let server = state.server_mut(at)?;
        let answer = server.release(self.rules, sender, holder.token);
        if let (Answer::Ended, Some((_, key))) = (answer, standing) {
            state.ended_live |= key.lease != lease || key.token > Some(holder.token);
        }
        Some(answer)
    }

    fn end(&self, state: &mut State, ended: usize, at: At) -> Option<Answer> {
        let found = state.nodes[at.node].found[ended]?;
        let standing = self.standing(state, 0, at);
        let answer = state.server_mut(at)?.end_found(self.rules, 0, found);
        if let (Answer::Ended, Some((_, key))) = (answer, standing) {
            state.ended_live |= key.token != found.token;
        }
        Some(answer)
    }

    /// Returns the proposal of a request, which is in an epoch that a counter of the nodes has
    /// reached.
    pub fn proposal(&self, request: usize) -> Option<Token> {
        let is_counted = |token: &Token| token.epoch == 1 && self.has_counted;
        let proposal = self.requests[request].proposal;
        let allows_forged = !self.rules.has(Rule::ProposalOfCountedEpoch);
        proposal.filter(|token| is_counted(token) || allows_forged)
    }

    /// Returns the sender of the scripts of a request.
    pub fn sender(&self, request: usize) -> Sender {
        let of = self.requests[request];
        Sender {
            lease: of.lease,
            attempt: of.attempt,
            ticket: of.ticket,
            resource: of.resource,
        }
    }

    pub(super) fn majority(&self) -> usize {
        self.nodes / 2 + 1
    }
}

/// Executes a loss of a node.
fn fault(state: &mut State, step: Step) -> Option<Answer> {
    let spent = &mut state.spent;
    match step {
        Step::Evict(at) => {
            spent.evictions += 1;
            state.server_mut(at)?.counter.take()?;
        }
        Step::Flush(at) => {
            spent.flushes += 1;
            let server = state.server_mut(at)?;
            (server.counter, server.keys) = (None, [None; 2]);
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
