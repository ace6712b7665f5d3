//! The possible steps.

use super::{
    At, Nodes, Of, Rule, Step,
    bounds::Quorum,
    client::{Request, Wish},
    server::Token,
    state::State,
};

impl Quorum {
    /// Grants the first request on all nodes.
    pub(super) fn first_granted(&self, mut state: State) -> State {
        let of = Of(0, self.requests[0]);
        let servers: Vec<At> = state.servers().collect();
        let takes = servers.iter().map(|at| Step::Take(of, *at, false));
        let all = Nodes((1 << servers.len()) - 1);
        for step in takes.chain([Step::Choose(of, all)]) {
            let (next, _) = self.step(&state, step).expect("no node has lost data yet");
            state = next;
        }
        state
    }

    pub(super) fn request_steps(&self, state: &State, of: Of, steps: &mut Vec<Step>) {
        let Of(request, what) = of;
        let progress = state.requests[request];
        if progress.before.is_none() && !self.may_begin(state, request) {
            return;
        }
        let may_choose = progress.choice.is_none() && !progress.over;
        let may_give_up = self.gives_up
            && progress.before.is_some()
            && progress.granted.is_none()
            && what.wish == Wish::Grant;
        let nodes_asked = state.nodes.iter().filter(|node| node.asked[request].ran);
        let is_on_its_way = progress.choice.is_none() && nodes_asked.count() < self.reach;
        let late_takes = state.spent.late_takes < self.most.late_takes;
        for at in state.servers() {
            let asked = state.nodes[at.node].asked[request];
            if (!asked.ran && is_on_its_way) || late_takes {
                self.takes(state, of, at, steps);
            }
            if progress.choice.is_some() && asked.taken.is_some() {
                steps.push(Step::Seal(of, at));
            }
            if asked.blank.is_some() {
                steps.push(Step::Begin(of, at));
            }
            if may_give_up {
                steps.push(Step::CleanUp(of, at));
            }
        }
        if may_choose {
            let all = (1..1 << state.nodes.len()).map(Nodes);
            let has_answered = |nodes: &Nodes| {
                let mut asked = state
                    .nodes
                    .iter()
                    .map(|node| node.asked[request])
                    .enumerate();
                nodes.0.count_ones() as usize >= self.majority()
                    && asked.all(|(place, asked)| asked.taken.is_some() || !nodes.has(place))
            };
            steps.extend(
                all.filter(has_answered)
                    .map(|nodes| Step::Choose(of, nodes)),
            );
        }
    }

    fn takes(&self, state: &State, of: Of, at: At, steps: &mut Vec<Step>) {
        let key = state
            .server(at)
            .and_then(|server| server.keys[of.1.resource]);
        let is_free = key.is_none_or(|key| key.lease == of.1.lease);
        if is_free || !self.rules.has(Rule::SealWhereFree) {
            steps.push(Step::Take(of, at, false));
        }
        if key.is_some() && of.0 >= self.expires_from {
            steps.push(Step::Take(of, at, true));
        }
    }

    /// Returns the takes that find the key of another lease. They change nothing, so a search omits
    /// them.
    pub fn refused_takes(&self, state: &State) -> Vec<Step> {
        let requests = self.requests.iter().enumerate();
        let takes = requests.flat_map(|(request, what)| {
            let is_anothers = |at: &At| {
                let server = state.server(*at);
                let key = server.and_then(|server| server.keys[what.resource]);
                key.is_some_and(|key| key.lease != what.lease)
            };
            let of = Of(request, *what);
            let can_be_sent = !what.only_mine() || self.named(state, request).is_some();
            let places = state
                .servers()
                .filter(move |at| can_be_sent && is_anothers(at));
            places.map(move |at| Step::Take(of, at, false))
        });
        takes.collect()
    }

    fn may_begin(&self, state: &State, request: usize) -> bool {
        let requests = &self.requests;
        let what = requests[request];
        // Interchangeable requests begin in order.
        let is_behind = |earlier: usize| {
            self.is_alike(&requests[earlier], &what) && state.requests[earlier].before.is_none()
        };
        if (0..request).any(is_behind) {
            return false;
        }
        if let Some(earlier) = what.instead_of {
            let earlier = state.requests[earlier];
            return earlier.choice.is_some() && earlier.granted.is_none() && !earlier.over;
        }
        !what.only_mine() || self.is_answered(state, what.lease)
    }

    fn is_alike(&self, one: &Request, other: &Request) -> bool {
        let is_alone = |lease: u8| {
            let requests = self.requests.iter();
            let calls = self
                .renewals
                .iter()
                .chain(&self.releases)
                .chain(&self.breaks);
            requests.filter(|request| request.lease == lease).count() == 1
                && !calls.clone().any(|of| *of == lease)
        };
        (one.resource, one.wish, one.proposal) == (other.resource, other.wish, other.proposal)
            && is_alone(one.lease)
            && is_alone(other.lease)
    }

    fn is_answered(&self, state: &State, lease: u8) -> bool {
        self.answered(state, lease, 0).own > Token::default()
    }

    pub(super) fn call_steps(&self, state: &State, at: At, steps: &mut Vec<Step>) {
        let node = &state.nodes[at.node];
        for (n, lease) in self.renewals.iter().enumerate() {
            let is_done = |n: usize| state.renewals[n].renewed.is_some();
            let is_next = !is_done(n) && (n == 0 || is_done(n - 1));
            if is_next && node.renewed[n].is_none() && self.is_answered(state, *lease) {
                steps.push(Step::Renew(n, *lease, at));
            }
        }
        for (n, lease) in self.releases.iter().enumerate() {
            if state.releases[n].is_some() || self.is_answered(state, *lease) {
                steps.push(Step::Release(n, *lease, at));
            }
        }
        for (n, lease) in self.breaks.iter().enumerate() {
            match node.found[n] {
                Some(_) => steps.push(Step::End(n, *lease, at)),
                None if self.is_answered(state, *lease) => steps.push(Step::ReadKey(n, *lease, at)),
                None => {}
            }
        }
    }

    pub(super) fn fault_steps(&self, state: &State, at: At, steps: &mut Vec<Step>) {
        let (spent, most) = (state.spent, self.most);
        let node = &state.nodes[at.node];
        if !self.rules.has(Rule::RenewalSetsNothing) {
            steps.push(Step::Expire(0, at));
        }
        if at.is_twin {
            return;
        }
        if spent.evictions < most.evictions {
            steps.push(Step::Evict(at));
        }
        if spent.flushes < most.flushes {
            steps.push(Step::Flush(at));
        }
        if spent.saves < most.saves {
            steps.push(Step::Save(at));
        }
        if spent.restarts < most.restarts {
            if most.saves == 0 && !self.saved {
                steps.push(Step::RestartEmpty(at));
            }
            if node.saved.is_some() {
                steps.push(Step::RestartFromDisk(at));
            }
        }
        let mut twins = state.servers().filter(|server| server.is_twin);
        if twins.next().is_none() && !self.rules.has(Rule::NodesStandAlone) {
            steps.push(Step::Promote(at));
        }
    }
}
