//! Random walks through the model of the queue, which the Redis scripts execute.
//!
//! Each issuer is a connection that receives the published messages. The model decides when an
//! issuer runs an acquisition again.

use std::collections::BTreeSet;

use futures_util::StreamExt;
use rand::seq::IndexedRandom;
use redis::aio::{MultiplexedConnection, PubSub};
use tower_fence_model::{
    lease::queue::{Lease, Queue, State, Step, Waiter, issuer_of},
    search::Rules,
};

use super::{
    broken::Change,
    walk::{Drawn, Walk},
};
use crate::support::{
    eventually,
    redis::{fresh_prefix, open, shared_url},
};

macro_rules! script {
    ($($file:literal),+) => {
        concat!($(include_str!(concat!("../../../../src/lease/redis/lua/", $file))),+)
    };
}

const WALKS: u64 = 150;

/// A duration that is longer than a walk.
const LONG_MS: i64 = 3_600_000;
const LONGER_MS: i64 = 2 * LONG_MS;

/// The time in which an offered lease must be confirmed.
const CONFIRM_MS: i64 = 1000;

#[tokio::test]
async fn scripts_match_the_model_of_the_queue() {
    walks(None).await;
}

/// Runs the walks with the real scripts, or with a broken one.
pub async fn walks(change: Option<Change>) {
    let mut drawn = Drawn::default();
    for faults in [0, 2] {
        let world = Queue {
            faults,
            rules: Rules::default(),
        };
        for seed in 0..WALKS {
            let mut redis = Redis::start(change).await;
            let mut walk = Walk::begin(&world, seed, &mut drawn);
            while let Some(&step) = walk.possible().choose(&mut walk.random) {
                let before = walk.go(step);
                redis.take(step, &before, &walk.state).await;
                redis.receive(&before, &walk.state).await;
                assert_eq!(redis.snapshot().await, Seen::expected(&walk.state));
            }
        }
    }
    drawn.are_all_but(&[]);
}

/// The observed state, and the waiters that the published messages wake.
#[derive(Debug, PartialEq)]
struct Seen {
    /// The id of the lease.
    lease: Option<String>,
    /// Whether the lease is offered and not confirmed. Such a lease expires soon.
    is_short: bool,
    queue: Vec<String>,
    /// The issuer that was offered the lease and has not confirmed it.
    unconfirmed: Option<usize>,
    messages: BTreeSet<usize>,
}

impl Seen {
    fn expected(state: &State) -> Self {
        Self {
            lease: match state.lease {
                Lease::Free => None,
                Lease::OfAnother => Some(ANOTHER.to_owned()),
                Lease::OfferedTo(waiter) | Lease::Of(waiter) => Some(id(waiter)),
            },
            is_short: matches!(state.lease, Lease::OfferedTo(_)),
            queue: state.queue.iter().copied().map(id).collect(),
            unconfirmed: state.unconfirmed,
            messages: (0..3).filter(|waiter| state.messages[*waiter]).collect(),
        }
    }
}

const ANOTHER: &str = "another";

fn id(waiter: usize) -> String {
    format!("waiter-{waiter}")
}

struct Redis {
    connection: MultiplexedConnection,
    /// The keys of the token counter, the lease, the queue and the waiters.
    keys: [String; 4],
    issuers: [Option<PubSub>; 2],
    /// The waiters that a message has reached.
    messages: BTreeSet<usize>,
    /// Whether the lease is offered and expires soon.
    is_short: bool,
    /// The change that breaks a script.
    change: Option<Change>,
}

impl Redis {
    async fn start(change: Option<Change>) -> Self {
        let prefix = fresh_prefix();
        let client = redis::Client::open(shared_url()).unwrap();
        let connection = open(&shared_url()).await.unwrap();
        let keys = ["clock", "lease:sku-1", "queue:sku-1", "waiters:sku-1"];
        let mut redis = Self {
            connection,
            keys: keys.map(|key| format!("{prefix}:{{110}}:{key}")),
            issuers: [None, None],
            messages: BTreeSet::new(),
            is_short: false,
            change,
        };
        for issuer in 0..2 {
            let mut subscription = client.get_async_pubsub().await.unwrap();
            subscription.subscribe(redis.channel(issuer)).await.unwrap();
            redis.issuers[issuer] = Some(subscription);
        }
        // The first request returns the token counter for which an epoch must begin.
        let needs = redis.acquire_once(ANOTHER, 0, 0).await;
        let ["epoch", replication_id, incarnation, "0"] = words(&needs)[..] else {
            panic!("{needs:?}");
        };
        let begin = script!("counter.lua", "begin_epoch.lua");
        let begun = redis.eval(begin, &[replication_id, incarnation, "1"]).await;
        assert_eq!(begun, redis::Value::Int(1));
        let granted = redis.acquire_once(ANOTHER, 0, 0).await;
        assert_eq!(granted[0], "granted");
        redis
    }

    fn channel(&self, issuer: usize) -> String {
        format!("{}:issuer:{issuer}", self.keys[0])
    }

    /// Takes a step, and compares its answer.
    async fn take(&mut self, step: Step, before: &State, after: &State) {
        match step {
            Step::Request(waiter) => self.acquire(waiter, after).await,
            Step::IsWoken(waiter) => {
                assert!(self.messages.remove(&waiter));
                if before.waiters[waiter] == Waiter::Sleeps {
                    self.acquire(waiter, after).await;
                }
            }
            // The waiter retries as a request that is already in the queue.
            Step::Retry(waiter) => {
                let reply = self.acquire_once(&id(waiter), LONG_MS, waiter).await;
                Self::is_answered(&reply, waiter, after);
            }
            Step::Release => {
                let holder = match before.lease {
                    Lease::Of(waiter) => id(waiter),
                    _ => ANOTHER.to_owned(),
                };
                let release = script!(
                    "release_first.lua",
                    "counter.lua",
                    "queue.lua",
                    "release.lua"
                );
                assert_eq!(self.run(release, &[&holder]).await, ["released"]);
            }
            Step::Expires => {
                let lease = self.keys[1].clone();
                let mut delete = redis::cmd("DEL");
                let deleted = delete.arg(lease).query_async(&mut self.connection).await;
                assert_eq!(deleted, Ok(1));
            }
            Step::MessageIsLost(waiter) => assert!(self.messages.remove(&waiter)),
            Step::IssuerIsKilled(issuer) => {
                self.issuers[issuer] = None;
                self.messages.retain(|waiter| issuer_of(*waiter) != issuer);
                let (channel, connection) = (self.channel(issuer), self.connection.clone());
                eventually("no process listens", async || {
                    let mut count = redis::cmd("PUBSUB");
                    let count = count.arg("NUMSUB").arg(&channel);
                    let count: (String, u64) =
                        count.query_async(&mut connection.clone()).await.unwrap();
                    count.1 == 0
                })
                .await;
            }
            Step::GoesAway(waiter) => {
                self.messages.remove(&waiter);
                let abandon = script!("counter.lua", "queue.lua", "abandon.lua");
                let reply = self.run(abandon, &[&id(waiter), &ticket(waiter)]).await;
                let expected = match before.lease {
                    Lease::OfferedTo(offered) if offered == waiter => "released",
                    _ => "lost",
                };
                assert_eq!(reply, [expected]);
            }
        }
    }

    /// Acquires as an issuer does: first without waiting, and then with a position in the queue.
    async fn acquire(&mut self, waiter: usize, after: &State) {
        let mut reply = self.acquire_once(&id(waiter), 0, waiter).await;
        if reply[0] == "held" {
            reply = self.acquire_once(&id(waiter), LONG_MS, waiter).await;
        }
        Self::is_answered(&reply, waiter, after);
    }

    fn is_answered(reply: &[String], waiter: usize, after: &State) {
        let expected = match after.lease == Lease::Of(waiter) {
            true => "granted",
            false => "queued",
        };
        assert_eq!(reply[0], expected, "{reply:?}");
    }

    async fn acquire_once(&mut self, id: &str, wait: i64, waiter: usize) -> Vec<String> {
        let channel = self.channel(issuer_of(waiter));
        let (ttl, wait, ticket) = (LONG_MS.to_string(), wait.to_string(), ticket(waiter));
        let mut more = vec![id, &ticket, &ttl, "0", ""];
        match &*wait {
            "0" => more.push("no"),
            wait => more.extend(["waits", wait, &channel, "0"]),
        }
        let acquire = script!(
            "acquire_first.lua",
            "counter.lua",
            "queue.lua",
            "acquire.lua"
        );
        let reply = self.run(acquire, &more).await;
        match &reply[..] {
            // The fast path returns only the token.
            [token] if token.parse::<u64>().is_ok() => vec!["granted".into(), token.clone()],
            _ => reply,
        }
    }

    async fn run(&mut self, script: &str, more: &[&str]) -> Vec<String> {
        redis::from_redis_value(self.eval(script, more).await).unwrap()
    }

    /// Runs a script. In the same transaction, extends a lease that expires soon, so that it lasts
    /// for the whole walk.
    async fn eval(&mut self, script: &str, more: &[&str]) -> redis::Value {
        let shared = ["the-source", "fresh", "0", "0", "0"];
        let script = self
            .change
            .map_or(script.into(), |change| change.applied(script));
        let script =
            format!("local SIZE, PUBLISH, DATABASE = 1000000000, 'PUBLISH', '0'\n{script}");
        let mut all = redis::pipe();
        all.atomic();
        all.cmd("EVAL").arg(&*script).arg(4).arg(&self.keys);
        all.arg(&shared).arg(more);
        all.cmd("PTTL").arg(&self.keys[1]);
        all.cmd("PEXPIRE")
            .arg(&self.keys[1])
            .arg(LONGER_MS)
            .ignore();
        let (reply, left): (redis::Value, i64) =
            all.query_async(&mut self.connection).await.unwrap();
        match left {
            0..=CONFIRM_MS => self.is_short = true,
            // The script has not changed the lease.
            _ if left > LONG_MS => {}
            _ => self.is_short = false,
        }
        reply
    }

    /// Receives all published messages, and records the sleeping waiters that they wake.
    async fn receive(&mut self, before: &State, after: &State) {
        for issuer in 0..2 {
            let channel = self.channel(issuer);
            let Some(subscription) = &mut self.issuers[issuer] else {
                continue;
            };
            // An empty message marks the end of the messages.
            let mut mark = redis::cmd("PUBLISH");
            let mark = mark.arg(&channel).arg("");
            let _: u64 = mark.query_async(&mut self.connection).await.unwrap();
            let mut messages = subscription.on_message();
            loop {
                let message: String = messages.next().await.unwrap().get_payload().unwrap();
                let Some((first, key)) = message.split_once(' ') else {
                    break;
                };
                assert_eq!(key, self.keys[1]);
                let sleeps = |waiter: &usize| {
                    let is_meant = first == ticket(*waiter) || first == "*";
                    is_meant
                        && issuer_of(*waiter) == issuer
                        && before.waiters[*waiter] == Waiter::Sleeps
                        && after.waiters[*waiter] != Waiter::Gone
                };
                self.messages.extend((0..3).filter(sleeps));
            }
        }
    }

    async fn snapshot(&mut self) -> Seen {
        let mut all = redis::pipe();
        all.cmd("GET").arg(&self.keys[1]);
        all.cmd("ZRANGE").arg(&self.keys[2]).arg(0).arg(-1);
        all.cmd("HGET").arg(&self.keys[3]).arg("");
        let (lease, queue, channel): (Option<String>, _, Option<String>) =
            all.query_async(&mut self.connection).await.unwrap();
        let lease = lease.map(|lease| lease.split(':').nth(2).unwrap().to_owned());
        let of = |channel: String| (0..2).find(|issuer| self.channel(*issuer) == channel);
        Seen {
            is_short: self.is_short && lease.is_some(),
            lease,
            queue,
            unconfirmed: channel.map(|channel| of(channel).unwrap()),
            messages: self.messages.clone(),
        }
    }
}

/// Returns the ticket of the request of a waiter.
fn ticket(waiter: usize) -> String {
    (waiter + 1).to_string()
}

fn words(reply: &[String]) -> Vec<&str> {
    reply.iter().map(String::as_str).collect()
}
