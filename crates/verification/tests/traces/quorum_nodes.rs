//! Real nodes of a quorum, which execute the steps of the model with the scripts of the crate. The
//! test compares their replies and the resulting keys with the model.

use std::{collections::HashMap, path::PathBuf};

use futures_util::future::join_all;
use redis::aio::MultiplexedConnection;
use tower_fence_model::quorum::{
    Answer, At, Key, Of, Quorum, Sender, Server, Stamp, State, Step, Token,
};

use super::broken::Change;
use crate::support::redis::{RedisServer, fresh_prefix, open};

macro_rules! script {
    ($file:literal) => {
        concat!(
            include_str!("../../../redlock/src/lua/node.lua"),
            include_str!(concat!("../../../redlock/src/lua/", $file)),
        )
    };
}

const TTL_MS: &str = "3600000";
const EPOCH_SIZE: &str = "1000000000";

/// A mapping between numbers in the model and the random ids of nodes and clients.
#[derive(Default)]
struct Names(Vec<(String, u8)>);

impl Names {
    /// Returns whether the real id and the number belong together. If both are new, adds them as a
    /// pair.
    fn agree(&mut self, real: &str, model: u8) -> bool {
        let known = self
            .0
            .iter()
            .find(|(one, other)| one == real || *other == model);
        match known {
            Some(known) => *known == (real.to_owned(), model),
            None => {
                self.0.push((real.to_owned(), model));
                true
            }
        }
    }

    fn real(&self, model: u8) -> &str {
        let known = self.0.iter().find(|(_, other)| *other == model);
        &known.expect("an earlier reply contained the id").0
    }
}

/// A node, and the mapping of its ids.
struct Node {
    connection: MultiplexedConnection,
    replication_ids: Names,
    incarnations: Names,
    saved: Vec<(PathBuf, Vec<u8>)>,
    /// The leases that the breaks have read.
    found: HashMap<usize, String>,
}

/// The nodes. Only servers that belong to this test can lose more than keys.
pub struct Nodes {
    prefix: String,
    nodes: Vec<Node>,
    own: Vec<RedisServer>,
    drawn: u64,
    /// The change that breaks a script.
    change: Option<Change>,
}

impl Nodes {
    pub async fn of(urls: &[String], own: Vec<RedisServer>, change: Option<Change>) -> Self {
        let mut nodes = vec![];
        for url in urls {
            nodes.push(Node {
                connection: open(url).await.unwrap(),
                replication_ids: Names::default(),
                incarnations: Names::default(),
                saved: vec![],
                found: HashMap::new(),
            });
        }
        Self {
            prefix: fresh_prefix(),
            nodes,
            own,
            drawn: 0,
            change,
        }
    }

    /// Creates the token counters of the initial state.
    pub async fn begin(&mut self, state: &State) {
        for (node, model) in state.nodes.iter().enumerate() {
            let Some(counter) = model.server.counter else {
                continue;
            };
            let info = self.command(node, &["INFO", "replication"]).await;
            let info: String = redis::from_redis_value(info).unwrap();
            let (_, replication_id) = info.split_once("master_replid:").unwrap();
            let replication_id = replication_id.split_whitespace().next().unwrap();
            let [serial, epoch, n] = [counter.serial, counter.epoch, counter.n.unwrap_or(0)];
            let key = self.counter();
            let numbers = [serial, epoch, n].map(|number| number.to_string());
            let mut words = vec!["HSET", &key, "source", "the-source", "nodes", "a b c"];
            words.extend(["history", replication_id, "incarnation", "f00d"]);
            let fields = ["serial", "epoch", "n"].into_iter().zip(&numbers);
            words.extend(fields.flat_map(|(field, number)| [field, number]));
            self.command(node, &words).await;
        }
    }

    /// Returns the servers for the next walk.
    pub fn into_own(self) -> Vec<RedisServer> {
        self.own
    }

    /// Takes a step of the model. Returns false if the reply of a script differs.
    pub async fn take(
        &mut self,
        world: &Quorum,
        state: &State,
        step: Step,
        answer: Answer,
    ) -> bool {
        let (at, resource, lease, text, more) = match step {
            Step::Choose(..) => return true,
            Step::Take(Of(request, of), at, expired) => {
                if expired {
                    let key = self.lease(of.resource);
                    self.command(at.node, &["DEL", &key]).await;
                }
                let mut more = attempt(world.sender(request));
                more.push(TTL_MS.to_owned());
                let text = match world.named(state, request) {
                    Some(holder) => {
                        more.push(number(holder.token));
                        script!("retake.lua")
                    }
                    None => {
                        let proposal = world.proposal(request);
                        let proposed = |of: fn(Token) -> u8| {
                            proposal.map_or_else(String::new, |token| of(token).to_string())
                        };
                        more.extend(["0", ""].map(str::to_owned));
                        more.extend([proposed(|token| token.epoch), proposed(|token| token.n)]);
                        script!("take.lua")
                    }
                };
                (at, of.resource, of.lease, text, more)
            }
            Step::Begin(Of(request, of), at) => {
                let (Some(blank), Some(epoch)) = (
                    state.nodes[at.node].asked[request].blank,
                    state.requests[request].epoch,
                ) else {
                    return false;
                };
                let mut more = self.nodes[at.node].counter(blank).to_vec();
                more.push(epoch.to_string());
                (at, of.resource, of.lease, script!("begin.lua"), more)
            }
            Step::Seal(Of(request, of), at) => {
                let (Some(taken), Some(choice)) = (
                    state.nodes[at.node].asked[request].taken,
                    state.requests[request].choice,
                ) else {
                    return false;
                };
                let mut more = attempt(world.sender(request));
                more.extend(self.nodes[at.node].stamp(taken.stamp));
                let (epoch, n) = (choice.count.epoch, choice.count.n);
                more.extend([number(choice.token), epoch.to_string(), n.to_string()]);
                let replaced = state.requests[request].holder;
                more.push(digits(replaced.map(|holder| holder.token)));
                (at, of.resource, of.lease, script!("seal.lua"), more)
            }
            Step::CleanUp(Of(request, of), at) => {
                let mut newest = attempt(world.sender(request));
                newest.reverse();
                (at, of.resource, of.lease, script!("abandon.lua"), newest)
            }
            Step::Renew(renewal, lease, at) => {
                let Some(holder) = state.renewals[renewal]
                    .holder
                    .or(world.holder(state, lease))
                else {
                    return false;
                };
                let mut more = attempt(world.holding(lease, holder));
                more.extend([TTL_MS.to_owned(), number(holder.token)]);
                (at, 0, lease, script!("renew.lua"), more)
            }
            Step::Release(release, lease, at) => {
                let Some(holder) = state.releases[release].or(world.holder(state, lease)) else {
                    return false;
                };
                let mut more = attempt(world.holding(lease, holder));
                more.push(number(holder.token));
                (at, 0, lease, script!("release.lua"), more)
            }
            Step::ReadKey(_, lease, at) => (at, 0, lease, script!("read.lua"), vec![]),
            Step::End(ended, lease, at) => {
                let found = self.nodes[at.node].found[&ended].clone();
                (at, 0, lease, script!("end.lua"), vec![found])
            }
            fault => {
                self.lose(fault).await;
                return true;
            }
        };
        // A break names no lease.
        let id = match step {
            Step::ReadKey(..) | Step::End(..) => String::new(),
            _ => letter(lease),
        };
        let node = at.node;
        self.drawn += 1;
        let (counter, lease) = (self.counter(), self.lease(resource));
        let fresh = format!("{:032x}", self.drawn);
        let text = self
            .change
            .map_or(text.into(), |change| change.applied(text));
        let mut words = vec!["EVAL", &text, "2", &counter, &lease];
        words.extend(["the-source", "a b c", &fresh, EPOCH_SIZE, &id]);
        words.extend(more.iter().map(String::as_str));
        let said = self.command(node, &words).await;
        let said: Vec<String> = redis::from_redis_value(said).unwrap();
        if let (Step::ReadKey(ended, lease, _), Answer::Found(key)) = (step, answer)
            && key.lease == lease
        {
            self.nodes[node].found.insert(ended, said[1].clone());
        }
        let said: Vec<&str> = match &said[..] {
            [text] => text.split(' ').collect(),
            texts => texts.iter().map(String::as_str).collect(),
        };
        self.nodes[node].says(answer, &said)
    }

    async fn lose(&mut self, fault: Step) {
        match fault {
            Step::Expire(resource, at) => {
                let key = self.lease(resource);
                self.command(at.node, &["DEL", &key]).await;
            }
            Step::Evict(at) => {
                let key = self.counter();
                self.command(at.node, &["DEL", &key]).await;
            }
            Step::Flush(at) => {
                self.own(at);
                self.command(at.node, &["FLUSHALL"]).await;
            }
            Step::Save(at) => {
                self.nodes[at.node].saved = self.own(at).append_only_files();
            }
            Step::RestartEmpty(at) => {
                self.own(at);
                self.command(at.node, &["FLUSHALL"]).await;
                self.restart(at.node, vec![]).await;
            }
            Step::RestartFromDisk(at) => {
                let saved = std::mem::take(&mut self.nodes[at.node].saved);
                self.restart(at.node, saved).await;
            }
            other => panic!("no node does that: {other:?}"),
        }
    }

    fn own(&mut self, at: At) -> &RedisServer {
        &self.own[at.node]
    }

    async fn restart(&mut self, node: usize, files: Vec<(PathBuf, Vec<u8>)>) {
        let server = &mut self.own[node];
        server.kill();
        server.restore(files);
        server.start_again().await;
        self.nodes[node].connection = open(&server.url()).await.unwrap();
    }

    /// Returns whether the state of all nodes is the same as in the model.
    pub async fn are_as(&mut self, state: &State) -> bool {
        let (counter, leases) = (self.counter(), [self.lease(0), self.lease(1)]);
        let snapshots = self
            .nodes
            .iter_mut()
            .map(|node| node.read_all(&counter, &leases));
        let found = join_all(snapshots).await;
        state.nodes.iter().enumerate().all(|(place, model)| {
            let (counter, leases) = &found[place];
            let is_as = self.nodes[place].is_as(&model.server, counter, leases);
            if !is_as {
                println!(
                    "node {}: {counter:?} {leases:?} is not {:?}",
                    place + 1,
                    model.server
                );
            }
            is_as
        })
    }

    fn counter(&self) -> String {
        format!("{}:quorum:{{110}}:counter", self.prefix)
    }

    fn lease(&self, resource: usize) -> String {
        format!("{}:quorum:{{110}}:lease:sku-{}", self.prefix, resource + 1)
    }

    async fn command(&mut self, node: usize, words: &[&str]) -> redis::Value {
        let mut command = redis::cmd(words[0]);
        let connection = &mut self.nodes[node].connection;
        command
            .arg(&words[1..])
            .query_async(connection)
            .await
            .unwrap()
    }
}

type Values = Vec<Option<String>>;

impl Node {
    /// Reads the token counter and the leases.
    async fn read_all(&mut self, counter: &str, leases: &[String]) -> (Values, Values) {
        let fields = ["history", "incarnation", "serial", "epoch", "n"];
        let mut both = redis::pipe();
        both.cmd("HMGET").arg(counter).arg(&fields);
        both.cmd("MGET").arg(leases);
        both.query_async(&mut self.connection).await.unwrap()
    }

    fn stamp(&self, stamp: Stamp) -> [String; 3] {
        let [replication_id, incarnation] = self.counter((stamp.replication_id, stamp.incarnation));
        [replication_id, incarnation, stamp.serial.to_string()]
    }

    /// Returns the replication id and the incarnation of a counter.
    fn counter(&self, (replication_id, incarnation): (u8, u8)) -> [String; 2] {
        let (replication_id, incarnation) = (
            self.replication_ids.real(replication_id),
            self.incarnations.real(incarnation),
        );
        [replication_id, incarnation].map(str::to_owned)
    }

    fn says(&mut self, answer: Answer, said: &[&str]) -> bool {
        let count = |usable: bool, counted: Token| {
            [u8::from(usable), counted.epoch, counted.n].map(|number| number.to_string())
        };
        let is_as = match (answer, said) {
            (Answer::Taken(taken), [answer, stamp @ .., incarnation, usable, epoch, n, token]) => {
                *answer == if taken.is_sealed { "sealed" } else { "taken" }
                    && self.is_stamp(stamp, taken.stamp)
                    && self.incarnations.agree(incarnation, taken.incarnation)
                    && [*usable, *epoch, *n] == count(taken.usable, taken.counted)
                    && *token == digits(taken.token)
            }
            (Answer::Renewed(renewed), ["renewed", token, usable, epoch, n]) => {
                *token == digits(renewed.token)
                    && [*usable, *epoch, *n] == count(renewed.usable, renewed.counted)
            }
            (Answer::Found(key), ["found", value, id, number, ticket, _, mark, ..]) => {
                let words: Vec<&str> = value.split(':').collect();
                let parts = [words.first(), words.get(1), words.get(2), words.get(7)];
                self.is_key(value, &key) && parts == [id, number, ticket, mark].map(Some)
            }
            (Answer::None, ["found", lease @ ..]) => *lease == [""; 8],
            (Answer::Held, ["held", ..])
            | (Answer::Older, ["older", _])
            | (Answer::Lost, ["lost"])
            | (Answer::Sealed, ["sealed"])
            | (Answer::Refused, ["refused"])
            | (Answer::Ended, ["ended"])
            | (Answer::Begun, ["begun"])
            | (Answer::None, ["none"]) => true,
            _ => false,
        };
        if !is_as {
            println!("{said:?} is not {answer:?}");
        }
        is_as
    }

    fn is_as(
        &mut self,
        model: &Server,
        counter: &[Option<String>],
        leases: &[Option<String>],
    ) -> bool {
        let is_counter = match (&model.counter, counter) {
            (None, counter) => counter.iter().all(Option::is_none),
            (
                Some(model),
                [
                    Some(replication_id),
                    Some(incarnation),
                    Some(serial),
                    Some(epoch),
                    n,
                ],
            ) => {
                let stamp = Stamp {
                    replication_id: model.replication_id,
                    incarnation: model.incarnation,
                    serial: model.serial,
                };
                self.is_stamp(&[replication_id, incarnation, serial], stamp)
                    && *epoch == model.epoch.to_string()
                    && *n == model.n.map(|n| n.to_string())
            }
            _ => false,
        };
        is_counter
            && model.keys.iter().zip(leases).all(|pair| match pair {
                (None, None) => true,
                (Some(key), Some(value)) => self.is_key(value, key),
                _ => false,
            })
    }

    fn is_key(&mut self, value: &str, key: &Key) -> bool {
        let words: Vec<&str> = value.split(':').collect();
        let [id, number, ticket, stamp @ .., token, mark, "0", ""] = &words[..] else {
            return false;
        };
        *id == letter(key.lease)
            && *number == key.attempt.to_string()
            && *ticket == key.ticket.to_string()
            && *mark == u8::from(key.mark).to_string()
            && self.is_stamp(stamp, key.stamp)
            && *token == digits(key.token)
    }

    fn is_stamp(&mut self, real: &[&str], model: Stamp) -> bool {
        let [replication_id, incarnation, serial] = real else {
            return false;
        };
        self.replication_ids
            .agree(replication_id, model.replication_id)
            && self.incarnations.agree(incarnation, model.incarnation)
            && *serial == model.serial.to_string()
    }
}

/// Returns the id of a lease.
fn letter(lease: u8) -> String {
    char::from(b'a' + lease).to_string()
}

/// Returns the number and the ticket of an attempt.
fn attempt(sender: Sender) -> Vec<String> {
    vec![sender.attempt.to_string(), sender.ticket.to_string()]
}

fn number(token: Token) -> String {
    (u64::from(token.epoch) * 1_000_000_000 + u64::from(token.n)).to_string()
}

fn digits(token: Option<Token>) -> String {
    token.map(number).unwrap_or_default()
}
