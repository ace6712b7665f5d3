//! A client that is paused in the middle of a grant, and resumes after its lease has expired: its
//! late messages change nothing.
//!
//! A proxy in front of each node holds back the messages of the client, or the answers to them,
//! while another client gets the lease. In a second case, a second request of the client with the
//! same lease id gets the lease. The key on the nodes then belongs to the client again, and the
//! obvious protocol confuses the late messages of the first request with those of the second one.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};

use sqlx::Sqlite;
use tokio::sync::watch;

use super::{
    load::{Issuer, TTL, fresh_id},
    naive::Naive,
};
use crate::support::{
    PATIENCE,
    database::{Fresh, TestDatabase},
    eventually,
    lease::LONG,
    nodes::{NODES, Nodes, leases_on},
    proxy::{Passage, Sender, contains},
    redis::keys,
};

const SKU: &str = "sku-1";
/// A resource in the same partition as the leased one.
const NEIGHBOUR: &str = "sku-124";
/// The token counter of that partition.
const COUNTER: &str = "tower-fence:quorum:{110}:counter";
/// The Redis user of the paused client, by which the proxies recognize the client.
const PAUSED: &str = "sleepyhead";

const ALL: &[usize] = &[0, 1, 2, 3, 4];
const MAJORITY: &[usize] = &[2, 3, 4];

/// The message that is held back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// The request that takes the key.
    Take,
    /// The answer to the request that takes the key, before the client has chosen a token.
    Taken,
    /// The request that stores the chosen token.
    Seal,
    /// The answer to the request that stores the token.
    Sealed,
}

/// A gate that holds back the messages from and to the paused client.
struct Gate {
    phase: Phase,
    on: &'static [usize],
    is_closed: watch::Sender<bool>,
    held: AtomicUsize,
}

impl Gate {
    /// Returns the rule for one connection to node `n`.
    fn rule(self: Arc<Self>, n: usize) -> impl FnMut(Sender, &[u8]) -> Passage + Send + 'static {
        let (mut is_paused, mut has_taken) = (false, false);
        move |sender, message| {
            let has = |text: &str| contains(message, text);
            is_paused |= sender == Sender::Client && has(PAUSED);
            let phase = match sender {
                Sender::Client if has_taken => Some(Phase::Seal),
                Sender::Client => has(":lease:sku-1").then_some(Phase::Take),
                Sender::Server if has_taken => has("sealed").then_some(Phase::Sealed),
                // The first round trip seals the token if it can.
                Sender::Server => (has("taken") || has("sealed")).then_some(Phase::Taken),
            };
            has_taken |= is_paused && phase == Some(Phase::Taken);
            let is_here = phase == Some(self.phase) && self.on.contains(&n);
            if !is_paused || !is_here || !*self.is_closed.borrow() {
                return Passage::Whole;
            }
            self.held.fetch_add(1, SeqCst);
            Passage::Held(self.is_closed.subscribe())
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Protocol {
    Ours,
    Naive,
}

struct Scene {
    nodes: Nodes,
    gate: Arc<Gate>,
    db: Fresh<Sqlite>,
    protocol: Protocol,
}

impl Scene {
    async fn new(protocol: Protocol, phase: Phase, on: &'static [usize]) -> Self {
        let gate = Arc::new(Gate {
            phase,
            on,
            is_closed: watch::Sender::new(true),
            held: AtomicUsize::new(0),
        });
        let rule = Arc::clone(&gate);
        let nodes = Nodes::judging(move |n| Arc::clone(&rule).rule(n)).await;
        for server in &nodes.servers {
            let user = format!("ACL SETUSER {PAUSED} on nopass ~* +@all");
            server.send(&user).await;
        }
        Self {
            nodes,
            gate,
            db: Sqlite::fresh(4).await,
            protocol,
        }
    }

    /// Returns an issuer without any cached state.
    fn issuer(&self) -> Issuer {
        self.issuer_on(&self.nodes.urls())
    }

    fn paused_issuer(&self) -> Issuer {
        let login = format!("//{PAUSED}:x@");
        let urls = self.nodes.urls();
        let urls: Vec<_> = urls.iter().map(|url| url.replace("//", &login)).collect();
        self.issuer_on(&urls)
    }

    fn issuer_on(&self, urls: &[String]) -> Issuer {
        match self.protocol {
            Protocol::Ours => Issuer::Ours(leases_on(urls, &self.db, PATIENCE)),
            Protocol::Naive => Issuer::Naive(Naive::new(urls, NODES / 2 + 1).patient(PATIENCE)),
        }
    }

    /// Acquires as soon as the lease is free.
    async fn next(&self, id: &str, ttl: Duration) -> i64 {
        let (issuer, mut token) = (self.issuer(), None);
        eventually("the lease is free", async || {
            token = issuer.acquire(SKU, id, ttl).await;
            token.is_some()
        })
        .await;
        token.unwrap()
    }

    async fn next_and_released(&self) -> i64 {
        let id = fresh_id();
        let token = self.next(&id, LONG).await;
        self.issuer().release(SKU, &id).await;
        token
    }

    async fn is_paused(&self) {
        eventually!(
            "the messages are held back",
            self.gate.held.load(SeqCst) >= self.gate.on.len()
        );
    }

    /// Returns the stored value of the held lease on each node.
    async fn stored(&self) -> Vec<Vec<u8>> {
        let mut stored = vec![];
        for server in &self.nodes.servers {
            for key in keys(&server.url(), "*:lease:sku-1").await {
                // The lease may have expired in the meantime.
                if let redis::Value::BulkString(value) = server.command(&["GET", &key]).await {
                    stored.push(value);
                }
            }
        }
        stored
    }

    /// Gives each node a different counter, so that a grant needs a second round trip.
    async fn part_counters(&self) {
        for (n, server) in self.nodes.servers.iter().enumerate() {
            server.send(&format!("HINCRBY {COUNTER} n {n}")).await;
        }
    }

    /// Grants the lease to other clients while the client is paused, and resumes the client.
    /// Returns the outcome.
    async fn play(self, repeats: bool) -> Played {
        let mut tokens = vec![self.next_and_released().await];
        if self.protocol == Protocol::Ours {
            self.part_counters().await;
        }
        let id = fresh_id();
        let paused = tokio::spawn({
            let (issuer, id) = (self.paused_issuer(), id.clone());
            async move { issuer.acquire(SKU, &id, TTL).await }
        });
        self.is_paused().await;
        tokens.push(self.next_and_released().await);
        eventually!("the lease has expired", self.stored().await.is_empty());
        let holder = if repeats { id } else { fresh_id() };
        let live = self.next(&holder, LONG).await;
        tokens.push(live);
        let before = self.stored().await;
        self.gate.is_closed.send_replace(false);
        let late = paused.await.unwrap();
        let undisturbed = self.stored().await == before;
        let renewed = self.issuer().renew(SKU, &holder, LONG).await;
        self.issuer().release(SKU, &holder).await;
        // Further grants use first the nodes that received the late token, and then other nodes.
        self.nodes.reach_only(MAJORITY);
        tokens.push(self.next_and_released().await);
        self.nodes.reach_only(&[0, 1, 2]);
        tokens.push(self.next_and_released().await);
        Played {
            tokens,
            live,
            late,
            renewed,
            undisturbed,
        }
    }
}

#[derive(Debug)]
struct Played {
    /// The tokens in the order of the grants.
    tokens: Vec<i64>,
    /// The token of the lease that was held when the client resumed.
    live: i64,
    /// The token that the client received.
    late: Option<i64>,
    /// The token of the live lease after a renewal.
    renewed: Option<i64>,
    /// Whether the late messages left the lease on the nodes unchanged.
    undisturbed: bool,
}

impl Played {
    fn is_in_order(&self) -> bool {
        self.tokens.windows(2).all(|pair| pair[0] < pair[1])
    }
}

/// Checks that the late messages change nothing for another holder, and that the client gets no
/// lease. If a repetition of its own request has the lease, the client may get that lease.
async fn changes_nothing(phase: Phase, on: &'static [usize]) {
    for repeats in [false, true] {
        let scene = Scene::new(Protocol::Ours, phase, on).await;
        let played = scene.play(repeats).await;
        assert!(played.is_in_order(), "{phase:?} {repeats} {played:?}");
        if repeats {
            // Each token that the client receives is that of the live lease. The client may receive
            // none, because the lease may have expired.
            let is_live = |token: Option<i64>| token.is_none_or(|token| token == played.live);
            assert!(is_live(played.late), "{phase:?} {played:?}");
            assert!(is_live(played.renewed), "{phase:?} {played:?}");
        } else {
            assert_eq!(played.late, None, "{phase:?} {played:?}");
            assert_eq!(played.renewed, Some(played.live), "{phase:?} {played:?}");
            assert!(played.undisturbed, "{phase:?} {played:?}");
        }
    }
}

/// Checks that the naive protocol gives the client a stale token, or a token of another client.
async fn is_a_hole_in_the_naive_protocol(phase: Phase, on: &'static [usize]) {
    let scene = Scene::new(Protocol::Naive, phase, on).await;
    let played = scene.play(true).await;
    let is_late = played.late.is_some_and(|late| late < played.live);
    assert!(is_late, "the pause does not expose the fault: {played:?}");
    if phase != Phase::Sealed {
        assert!(!played.is_in_order(), "{played:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn issuer_may_pause_before_most_nodes_receive_the_request() {
    changes_nothing(Phase::Take, MAJORITY).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn issuer_may_pause_after_taking_its_keys() {
    changes_nothing(Phase::Taken, ALL).await;
    is_a_hole_in_the_naive_protocol(Phase::Taken, ALL).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn issuer_may_pause_after_choosing_its_token() {
    changes_nothing(Phase::Seal, ALL).await;
    is_a_hole_in_the_naive_protocol(Phase::Seal, ALL).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn issuer_may_pause_after_storing_on_a_minority() {
    changes_nothing(Phase::Seal, MAJORITY).await;
    is_a_hole_in_the_naive_protocol(Phase::Seal, MAJORITY).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn issuer_may_pause_after_storing_its_token() {
    changes_nothing(Phase::Sealed, ALL).await;
    is_a_hole_in_the_naive_protocol(Phase::Sealed, ALL).await;
}

/// Afterwards the counters of the minority are ahead, and the next grant cannot reach these nodes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn token_stored_on_a_minority_ends_no_other_lease() {
    let scene = Scene::new(Protocol::Ours, Phase::Seal, MAJORITY).await;
    let (issuer, id) = (scene.issuer(), fresh_id());
    let token = issuer.acquire(SKU, &id, LONG).await;
    assert!(token.is_some());
    scene.part_counters().await;
    let paused = scene.paused_issuer();
    tokio::spawn(async move { paused.acquire(NEIGHBOUR, &fresh_id(), LONG).await });
    scene.is_paused().await;
    assert_eq!(issuer.renew(SKU, &id, LONG).await, token);
    scene.nodes.reach_only(MAJORITY);
    assert_eq!(issuer.renew(SKU, &id, LONG).await, token);
}

/// Meanwhile the nodes lose their counters, and another epoch begins on them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn token_that_a_lost_counter_has_counted_is_not_stored() {
    let scene = Scene::new(Protocol::Ours, Phase::Seal, ALL).await;
    scene.next_and_released().await;
    scene.part_counters().await;
    let paused = scene.paused_issuer();
    let late = tokio::spawn(async move { paused.acquire(SKU, &fresh_id(), LONG).await });
    scene.is_paused().await;
    for server in &scene.nodes.servers {
        server.command(&["DEL", COUNTER]).await;
    }
    let neighbour = scene.issuer().acquire(NEIGHBOUR, &fresh_id(), LONG).await;
    scene.gate.is_closed.send_replace(false);
    let late = late.await.unwrap();
    assert!(late > neighbour, "{late:?} {neighbour:?}");
}
