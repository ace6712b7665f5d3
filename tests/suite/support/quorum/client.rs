//! What a client does: requests, renewals and releases, one step after the other.

use std::collections::BTreeSet;

use super::{
    MAJORITY, Quorum, RESOURCE,
    rules::{ABANDON, END, LOOK, RENEW, Rule, SEAL, TAKE},
    verdict::{Event, Kind, Token},
};

const TTL_MS: &str = "60000";

/// A key that was taken: its stamp, the clock, and the token that was stored.
#[derive(Clone)]
struct Taken {
    node: usize,
    stamp: [String; 3],
    is_usable: bool,
    clock: Token,
    stored: Option<Token>,
}

/// One attempt at a grant.
pub struct Request {
    lease: &'static str,
    resource: &'static str,
    attempt: u64,
    only_mine: bool,
    epoch_ahead: Option<i64>,
    epoch_is_over: bool,
    began: usize,
    taken: Vec<Taken>,
    at_least: Option<Token>,
    token: Option<Token>,
    /// By which it was counted: where the token has to be higher than that, the clock does not follow.
    count: Option<Token>,
    sealed: BTreeSet<usize>,
}

impl Request {
    pub fn on(self, resource: &'static str) -> Self {
        Self { resource, ..self }
    }

    /// Another token for a lease that is held.
    pub fn only_mine(self) -> Self {
        Self {
            only_mine: true,
            ..self
        }
    }

    /// The resource has seen what is below.
    pub fn at_least(self, epoch: i64, n: i64) -> Self {
        Self {
            at_least: Some(Token::new(epoch, n)),
            ..self
        }
    }
}

/// A seal that is under way.
pub struct Seal {
    node: usize,
    words: Vec<String>,
}

/// What a release has found on the nodes, and is going to end.
pub struct Found(Vec<(usize, String)>);

impl Quorum<'_> {
    /// A request under this lease id: the next attempt, where there was one.
    pub fn request(&mut self, lease: &'static str) -> Request {
        self.attempt += 1;
        Request {
            lease,
            resource: RESOURCE,
            attempt: self.attempt,
            only_mine: false,
            epoch_ahead: None,
            epoch_is_over: false,
            began: self.step,
            taken: vec![],
            at_least: None,
            token: None,
            count: None,
            sealed: BTreeSet::new(),
        }
    }

    /// An issuer takes an epoch before it needs one, unless it has to ask when it does.
    pub fn ask_ahead(&mut self, request: &mut Request) {
        if self.lacks(Rule::EpochAskedNow) {
            request.epoch_ahead = Some(self.next_epoch(0));
        }
    }

    /// The first script runs on these nodes. Answers that come after the choice are not used. Returns how each begins.
    pub async fn take(&mut self, request: &mut Request, nodes: &[usize]) -> Vec<String> {
        if request.taken.is_empty() {
            request.began = self.step;
        }
        let mut said = vec![];
        for &node in nodes {
            let of = (request.resource, request.lease);
            let words = request.attempt_words();
            let more = [TTL_MS, "0", "", if request.only_mine { "1" } else { "0" }];
            let words: Vec<_> = words.into_iter().chain(more.map(str::to_owned)).collect();
            let answer = self.run(node, TAKE, of, &words).await;
            said.push(answer[0].clone());
            let is_late = request.token.is_some() && !self.lacks(Rule::SealWhereCounted);
            if answer[0] != "taken" || is_late {
                continue;
            }
            let number = |n: usize| answer[n].parse().unwrap();
            request.taken.retain(|taken| taken.node != node);
            request.taken.push(Taken {
                node,
                stamp: [1, 2, 3].map(|n| answer[n].clone()),
                is_usable: answer[4] == "1",
                clock: Token::new(number(5), number(6)),
                stored: Token::parse(&answer[7]),
            });
        }
        said
    }

    /// The client chooses a token, if it has a majority.
    pub fn choose(&mut self, request: &mut Request) {
        if request.taken.len() < MAJORITY {
            return;
        }
        let mut counted = request.taken.clone();
        if self.lacks(Rule::HighestOfMajority) {
            counted.truncate(1);
        }
        if self.lacks(Rule::LostIsNotPassedOver) && counted.iter().any(|taken| taken.is_usable) {
            counted.retain(|taken| taken.is_usable);
        }
        if self.lacks(Rule::LostIsNotZero) {
            for lost in counted.iter_mut().filter(|taken| !taken.is_usable) {
                (lost.is_usable, lost.clock) = (true, Token::new(1, 0));
            }
        }
        let highest = counted.iter().map(|taken| taken.clock).max().unwrap();
        let usable = counted.iter().all(|taken| taken.is_usable) && !request.epoch_is_over;
        if let Some(token) = request.stored().filter(|_| usable && !request.only_mine) {
            // A repetition, which seals nothing.
            request.token = Some(token);
            request.taken.clear();
            return self.note(request, Kind::Granted, token);
        }
        let count = match request.epoch_ahead {
            _ if usable => Token::new(highest.epoch, highest.n + 1),
            Some(epoch) => Token::new(epoch, 1),
            None if self.lacks(Rule::EpochFromDatabase) => Token::new(highest.epoch + 1, 1),
            None => Token::new(self.next_epoch(highest.epoch), 1),
        };
        let stored = request.taken.iter().filter_map(|taken| taken.stored).max();
        let above = stored.filter(|_| !self.lacks(Rule::AboveStoredToken));
        let above = above.map(|stored| Token::new(stored.epoch, stored.n + 1));
        let token = count.max(above.unwrap_or(count));
        let token = token.max(request.at_least.unwrap_or(token));
        (request.count, request.token) = (Some(count), Some(token));
        if self.lacks(Rule::Seal) {
            self.note(request, Kind::Granted, token);
        }
    }

    /// The second script, on its way to a node that was counted.
    pub fn send_seal(&self, request: &Request, node: usize) -> Option<Seal> {
        let taken = request.taken.iter().find(|taken| taken.node == node)?;
        let (token, count, mut words) = (request.token?, request.count?, request.attempt_words());
        words.extend(taken.stamp.clone());
        words.extend([token.number(), count.epoch, count.n].map(|number| number.to_string()));
        Some(Seal { node, words })
    }

    /// It runs. True when the node has sealed.
    pub async fn arrives(&mut self, request: &Request, seal: Option<Seal>) -> bool {
        let Some(seal) = seal else {
            return false;
        };
        let of = (request.resource, request.lease);
        self.run(seal.node, SEAL, of, &seal.words).await[0] == "sealed"
    }

    /// Seals are sent to these nodes, and run. Granted is what a majority has sealed.
    pub async fn seal(&mut self, request: &mut Request, nodes: &[usize]) {
        let enough = match self.lacks(Rule::SealOnMajority) {
            true => 1,
            false => MAJORITY,
        };
        for &node in nodes {
            let seal = self.send_seal(request, node);
            if self.arrives(request, seal).await
                && request.sealed.insert(node)
                && request.sealed.len() == enough
                && !self.lacks(Rule::Seal)
                && let Some(token) = request.token
            {
                let kind = match request.only_mine {
                    true => Kind::Renewed,
                    false => Kind::Granted,
                };
                self.note(request, kind, token);
            }
        }
    }

    /// The source of epochs says that the one of the token is over, and the client begins anew.
    pub fn begin_anew(&mut self, request: &mut Request) {
        let next = self.request(request.lease);
        let attempt = match self.lacks(Rule::OneChoice) {
            true => request.attempt,
            false => next.attempt,
        };
        *request = Request {
            attempt,
            epoch_is_over: true,
            ..next
        };
    }

    /// All of a grant at once.
    pub async fn grant(&mut self, mut request: Request, nodes: &[usize]) -> Request {
        self.take(&mut request, nodes).await;
        self.choose(&mut request);
        self.seal(&mut request, nodes).await;
        request
    }

    /// A lease that has come and gone. All clocks stand at 1.1 then.
    pub async fn first_grant(&mut self) {
        let first = self.request("first");
        self.grant(first, &[1, 2, 3]).await;
        self.expire(&[1, 2, 3]).await;
    }

    /// The holder renews its lease on these nodes, if that can be.
    pub async fn renew(&mut self, lease: &Request, nodes: &[usize]) {
        self.try_renew(lease, nodes).await;
    }

    /// The holder renews a lease that is to be held still.
    pub async fn renew_live(&mut self, lease: &Request, nodes: &[usize]) {
        if !self.try_renew(lease, nodes).await
            && let Some(token) = lease.token
        {
            self.note(lease, Kind::Lost, token);
        }
    }

    async fn try_renew(&mut self, lease: &Request, nodes: &[usize]) -> bool {
        let (began, mut renewed) = (self.step, vec![]);
        for &node in nodes {
            let of = (lease.resource, lease.lease);
            let answer = self.run(node, RENEW, of, &[TTL_MS.to_owned()]).await;
            if answer[0] == "renewed" {
                renewed.push(Token::parse(&answer[1]));
            }
        }
        let any = self.lacks(Rule::RenewalNeedsToken) || self.lacks(Rule::RenewalNeedsSameToken);
        let token = match any {
            true if renewed.len() >= MAJORITY => lease.token,
            true => None,
            false => most(&renewed),
        };
        if let Some(token) = token {
            self.note_since(lease, Kind::Renewed, token, began);
        }
        token.is_some()
    }

    /// A release looks at what there is.
    pub async fn look(&mut self, lease: &Request, nodes: &[usize]) -> Found {
        let mut found = vec![];
        for &node in nodes {
            let answer = self.run(node, LOOK, (lease.resource, ""), &[]).await;
            if answer[0] == "found" && answer[2] == lease.lease {
                found.push((node, answer[1].clone()));
            }
        }
        Found(found)
    }

    /// And ends it.
    pub async fn end(&mut self, lease: &Request, found: &Found) {
        for (node, value) in &found.0 {
            let value = [value.clone()];
            self.run(*node, END, (lease.resource, ""), &value).await;
        }
    }

    /// A client that gives up takes back what its attempt has left.
    pub async fn clean_up(&mut self, request: &Request, nodes: &[usize]) {
        for &node in nodes {
            let is_sealed = request.taken.iter().any(|taken| taken.node == node);
            let token = request
                .token
                .filter(|_| is_sealed || self.lacks(Rule::CleanUpWhereSealed));
            let mut words = request.attempt_words();
            words.push(token.map_or_else(String::new, |token| token.number().to_string()));
            let of = (request.resource, request.lease);
            self.run(node, ABANDON, of, &words).await;
        }
    }

    fn note(&mut self, request: &Request, kind: Kind, token: Token) {
        self.note_since(request, kind, token, request.began);
    }

    fn note_since(&mut self, request: &Request, kind: Kind, token: Token, began: usize) {
        self.events.push(Event {
            lease: request.lease,
            resource: request.resource,
            token,
            kind,
            began,
            answered: self.step,
        });
    }
}

impl Request {
    /// Number and nonce, which are the same here.
    fn attempt_words(&self) -> Vec<String> {
        vec![self.attempt.to_string(), self.attempt.to_string()]
    }

    /// The token that a majority has.
    fn stored(&self) -> Option<Token> {
        most(
            &self
                .taken
                .iter()
                .map(|taken| taken.stored)
                .collect::<Vec<_>>(),
        )
    }
}

/// What a majority has said.
fn most(tokens: &[Option<Token>]) -> Option<Token> {
    let is_most = |token: &Token| {
        let same = tokens.iter().filter(|other| **other == Some(*token));
        same.count() >= MAJORITY
    };
    tokens.iter().flatten().copied().find(is_most)
}
