//! The queue of waiters over two processes, which communicate only through Postgres.

use std::{
    collections::{HashMap, VecDeque},
    time::Duration,
};

use reqwest::Client;
use serde_json::{Value, json};
use sqlx::Postgres;
use tokio::{
    sync::mpsc,
    task::JoinSet,
    time::{Instant, timeout},
};

use crate::support::{
    PATIENCE,
    database::{Fresh, TestDatabase},
    eventually,
    http::Answer,
    process::Inventory,
};

/// The number of waiters that join concurrently. The next ones join afterwards.
const AT_ONCE: usize = 50;

/// The time for which a free lease is reserved for the first waiter. If a busy machine needs longer
/// for a hand-off, all waiters of that process lose their positions, and join the queue again.
const TURN: Duration = Duration::from_secs(2);

/// The time for all waiters. It is long, because a busy machine needs a minute for a thousand.
const FOR_ALL: Duration = PATIENCE.saturating_mul(5);

/// A waiter that was granted the lease.
struct Turn {
    waiter: usize,
    token: i64,
    granted_at: Instant,
}

/// Two processes of the example, and a held lease.
struct Processes {
    db: Fresh<Postgres>,
    services: [Inventory; 2],
    client: Client,
    held: Value,
}

impl Processes {
    async fn start() -> Self {
        let db = Postgres::fresh(2).await;
        let wait_limit = FOR_ALL.as_millis().to_string();
        let variables = [
            ("DATABASE_URL", db.url.as_str()),
            ("WAIT_LIMIT_MS", &wait_limit),
        ];
        let one = Inventory::start(&variables).await;
        let mut two = Inventory::start(&variables).await;
        two.prints("leases:          Postgres", 1).await;
        let client = Client::new();
        // The lease must not expire before all waiters are in the queue.
        let body = json!({ "ttl_ms": FOR_ALL.as_millis() as u64 });
        let held = client.post(one.url("/locks/sku-1")).json(&body);
        Self {
            db,
            held: Answer::to(held).await.json(),
            services: [one, two],
            client,
        }
    }

    /// Queues `count` waiters, alternately at the two processes. Each granted waiter reports its
    /// turn, and releases the lease at the process that granted it. Returns when all waiters are in
    /// the queue.
    async fn enqueue(
        &self,
        count: usize,
        ttl_ms: u64,
        turns: &mpsc::UnboundedSender<Turn>,
    ) -> [JoinSet<reqwest::Result<()>>; 2] {
        let mut tasks = [JoinSet::new(), JoinSet::new()];
        for waiter in 0..count {
            let (turns, client) = (turns.clone(), self.client.clone());
            let url = self.services[waiter % 2].url("/locks/sku-1");
            tasks[waiter % 2].spawn(async move {
                let body = json!({
                    "ttl_ms": ttl_ms, "wait_ms": FOR_ALL.as_millis() as u64, "owner": waiter.to_string(),
                });
                let answer = client.post(&url).json(&body).send().await?;
                let granted_at = Instant::now();
                let status = answer.status();
                let lease: Value = answer.json().await?;
                assert_eq!(status, 201, "{lease}");
                let turn = Turn {
                    waiter,
                    token: lease["token"].as_i64().unwrap(),
                    granted_at,
                };
                turns.send(turn).unwrap();
                let id = lease["lease_id"].as_str().unwrap();
                let release = client.delete(url).header("Lease-Id", id).send().await?;
                assert_eq!(release.status(), 204, "{}", release.text().await?);
                Ok(())
            });
            if (waiter + 1) % AT_ONCE == 0 {
                let joined = waiter as i64 + 1;
                eventually!("the waiters join", self.waiters().await == joined);
            }
        }
        tasks
    }

    async fn waiters(&self) -> i64 {
        let waiters = "SELECT count(*) FROM tower_fence.waiters";
        self.db.number(waiters).await
    }

    /// Returns the position of each waiter in the queue.
    async fn places(&self) -> HashMap<usize, usize> {
        let line = "SELECT owner FROM tower_fence.waiters ORDER BY place, ticket";
        let line = sqlx::query_scalar(line).fetch_all(&self.db.pool).await;
        let line: Vec<String> = line.unwrap();
        let places = line.iter().enumerate();
        let places = places.map(|(place, owner)| (owner.parse().unwrap(), place));
        places.collect()
    }

    /// Releases the lease that was held from the start.
    async fn release(&self) {
        let release = self.client.delete(self.services[0].url("/locks/sku-1"));
        let release = release.header("Lease-Id", self.held["lease_id"].as_str().unwrap());
        assert_eq!(Answer::to(release).await.status, 204);
    }
}

async fn all_served(tasks: &mut JoinSet<reqwest::Result<()>>) {
    let all = async {
        while let Some(served) = tasks.join_next().await {
            served.unwrap().unwrap();
        }
    };
    let served = timeout(FOR_ALL, all).await;
    served.expect("a waiter was never served");
}

/// Checks that the turns have the order of the positions, and that their tokens increase. So no
/// waiter has two turns. Returns whether no process has lost the positions of its waiters.
fn are_in_order(turns: &[Turn], places: &HashMap<usize, usize>) -> bool {
    let mut line: Vec<_> = turns.iter().map(|turn| turn.waiter).collect();
    line.sort_unstable_by_key(|waiter| places[waiter]);
    let mut line = VecDeque::from(line);
    let mut joined_again = vec![];
    let mut last: Option<&Turn> = None;
    for turn in turns {
        let is_late = last.is_some_and(|last| turn.granted_at - last.granted_at >= TURN);
        while is_late && let Some(&late) = line.front().filter(|first| **first != turn.waiter) {
            joined_again.push(late % 2);
            line.retain(|waiter| waiter % 2 != late % 2);
        }
        if !joined_again.contains(&(turn.waiter % 2)) {
            // No waiter is overtaken.
            assert_eq!(line.pop_front(), Some(turn.waiter));
        }
        assert!(last.is_none_or(|last| last.token < turn.token));
        last = Some(turn);
    }
    joined_again.is_empty()
}

/// Returns the times between two grants, sorted.
fn steps(turns: &[Turn]) -> Vec<Duration> {
    let step = |pair: &[Turn]| pair[1].granted_at - pair[0].granted_at;
    let mut steps: Vec<_> = turns.windows(2).map(step).collect();
    steps.sort_unstable();
    steps
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiters_at_two_processes_are_served_in_order() {
    const WAITERS: usize = 400;
    let processes = Processes::start().await;
    let (turn_sender, mut turns) = mpsc::unbounded_channel();
    let mut tasks = processes.enqueue(WAITERS, 30_000, &turn_sender).await;
    let places = processes.places().await;
    // A waiter that joined while others were already in the queue is behind them.
    let mut batches: Vec<_> = places.iter().collect();
    batches.sort_unstable_by_key(|(_, place)| **place);
    assert!(batches.is_sorted_by_key(|(waiter, _)| *waiter / AT_ONCE));

    processes.release().await;
    for tasks in &mut tasks {
        all_served(tasks).await;
    }
    let mut served = vec![];
    turns.recv_many(&mut served, WAITERS + 1).await;
    assert_eq!(served.len(), WAITERS);
    let all_kept_positions = are_in_order(&served, &places);
    // Many hand-offs go from one process to the other.
    let crosses = |pair: &&[Turn]| pair[0].waiter % 2 != pair[1].waiter % 2;
    let crossed = served.windows(2).filter(crosses).count();
    assert!(crossed > WAITERS / 5 || !all_kept_positions, "{crossed}");
    assert_eq!(processes.waiters().await, 0);
    let steps = steps(&served);
    println!(
        "grant to grant: p50 {:?}, longest {:?}",
        steps[WAITERS / 2],
        steps.last()
    );
}

/// The process is killed while the lease passes from waiter to waiter. The process may be waking a
/// waiter, granting the lease, or about to be notified.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiters_of_a_killed_process_are_skipped() {
    const WAITERS: usize = 600;
    const TTL_MS: u64 = 3_000;
    let processes = Processes::start().await;
    let (turn_sender, mut turns) = mpsc::unbounded_channel();
    let [mut living, mut doomed] = processes.enqueue(WAITERS, TTL_MS, &turn_sender).await;
    let places = processes.places().await;
    processes.release().await;
    let mut served = vec![];
    while served.len() < WAITERS / 10 {
        served.extend(turns.recv().await);
    }
    processes.services[1].signal("-KILL");
    all_served(&mut living).await;
    // All connections of the killed process have ended.
    let mut cut_off = 0;
    while let Some(outcome) = doomed.join_next().await {
        cut_off += usize::from(outcome.unwrap().is_err());
    }
    drop(turn_sender);
    turns.recv_many(&mut served, WAITERS).await;
    are_in_order(&served, &places);
    let alive = served.iter().filter(|turn| turn.waiter % 2 == 0);
    assert_eq!(alive.count(), WAITERS / 2);
    assert!(cut_off > WAITERS / 6, "it was killed too late: {cut_off}");
    assert_eq!(processes.waiters().await, 0);
    // Otherwise, each waiter of the killed process would delay the next one by a turn. One lease
    // may have to expire, because only the killed process had its id.
    let slow = steps(&served).into_iter().filter(|step| *step >= TURN);
    let slow = slow.count();
    println!("{cut_off} waiters were cut off; {slow} grants took a turn or longer");
    assert!(slow <= cut_off / 10, "{slow} grants waited for a turn");
}
