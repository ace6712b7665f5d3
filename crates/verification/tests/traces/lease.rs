//! Random walks through the model of leases and losses, which the store in Redis executes.

use rand::{RngExt, seq::IndexedRandom};
use sqlx::Sqlite;
use tower_fence::{
    Resource,
    epochs::Epoch,
    lease::{LeaseId, Leases, RedisLeases},
};
use tower_fence_model::lease::{
    Kind, Of,
    losses::{
        Loss, Losses, Step,
        state::{Holder, State},
    },
};

use super::{
    lease_call::{call, real_token},
    walk::{Drawn, Walk},
};
use crate::support::{
    database::Fresh,
    eventually,
    lease::{highest_epoch, sku},
    redis::{COUNTER, LEASE, RedisServer, connect, dump, restore, with_leases},
};

const STEPS: usize = 30;

/// The number of tokens in an epoch in the model.
const NUMBERS: u8 = 32;

/// The other resource of the partition, and its lease.
const APART: [&str; 2] = ["sku-124", "tower-fence:{110}:lease:sku-124"];

/// Returns the real token for a token of the model.
fn token(model: u8) -> i64 {
    real_token(model, NUMBERS)
}

/// The observed state: the epoch of the database, the token counter, and the token and the stamp of
/// each lease. The token counter consists of its epoch, its number, and whether it has the
/// replication id of the server.
type Seen = (i64, Option<(i64, Option<i64>, bool)>, [Option<Vec<i64>>; 2]);

/// The real servers and issuers.
struct Real {
    redis: RedisServer,
    db: Fresh<Sqlite>,
    issuers: Vec<RedisLeases>,
    ids: Vec<LeaseId>,
    /// Whether the last holder acquires the other resource.
    apart: bool,
    saved: Vec<(String, Vec<u8>)>,
}

impl Real {
    async fn start(apart: bool) -> Self {
        let (redis, db, first) = with_leases().await;
        let issuers = vec![first, connect(&redis, &db).await];
        Self {
            redis,
            db,
            issuers,
            ids: (0..3).map(|_| LeaseId::random()).collect(),
            apart,
            saved: vec![],
        }
    }

    fn resource(&self, holder: usize) -> Resource {
        match self.apart && holder + 1 == self.ids.len() {
            true => Resource::new(APART[0]).unwrap(),
            false => sku(),
        }
    }

    /// Takes a step, and returns the token in the answer.
    async fn take(&mut self, step: Step) -> Option<i64> {
        match step {
            Step::Ask(kind, holder, issuer) => {
                let issuer = &self.issuers[usize::from(issuer)];
                let resource = self.resource(holder.0);
                return call(issuer, kind, &resource, &self.ids[holder.0]).await;
            }
            Step::LeaseExpires { resource, .. } => {
                self.redis.command(&["DEL", LEASES[resource]]).await;
            }
            Step::RedisIsSaved => self.saved = self.keys().await,
            Step::Lose(loss) => self.lose(loss).await,
            other => unreachable!("{other:?} is not drawn"),
        }
        None
    }

    async fn lose(&mut self, loss: Loss) {
        let kept = match loss {
            Loss::RedisRestarts => self.keys().await,
            Loss::RedisRestartsFromAnOldFile | Loss::KeysAreCopiedBack => {
                std::mem::take(&mut self.saved)
            }
            Loss::CounterIsEvicted => {
                self.redis.command(&["DEL", COUNTER]).await;
                return;
            }
            Loss::IssuerRestarts(issuer) => {
                self.issuers[usize::from(issuer)] = connect(&self.redis, &self.db).await;
                return;
            }
            _ => vec![],
        };
        match loss {
            Loss::RedisIsFlushed | Loss::KeysAreCopiedBack => {
                self.redis.command(&["FLUSHALL"]).await;
            }
            _ => {
                self.redis.kill();
                self.redis.start_again().await;
                // Waits until the issuers have reconnected. On a broken connection, the effect of a
                // request would be unknown.
                for issuer in &self.issuers {
                    let answers = async || issuer.inspect(&sku()).await.is_ok();
                    eventually("an issuer connects again", answers).await;
                }
            }
        }
        restore(&self.redis, &kept).await;
    }

    async fn keys(&self) -> Vec<(String, Vec<u8>)> {
        let mut there = vec![];
        for key in [COUNTER, LEASES[0], LEASES[1]] {
            if self.redis.read(&format!("EXISTS {key}")).await {
                there.push(key);
            }
        }
        dump(&self.redis, &there).await
    }

    async fn seen(&self) -> Seen {
        let fields = format!("HMGET {COUNTER} history epoch n");
        let fields: Vec<Option<String>> = self.redis.read(&fields).await;
        let info = self.redis.info("INFO replication").await;
        let number = |text: &String| text.parse::<i64>().unwrap();
        let counter = fields[1].as_ref().map(|epoch| {
            let replication_id = fields[0].as_ref().unwrap();
            let is_own = info.contains(&format!("master_replid:{replication_id}"));
            (number(epoch), fields[2].as_ref().map(number), is_own)
        });
        let leases = [self.stamp(LEASES[0]).await, self.stamp(LEASES[1]).await];
        (highest_epoch(&self.db).await, counter, leases)
    }

    async fn stamp(&self, key: &str) -> Option<Vec<i64>> {
        let lease: Option<String> = self.redis.read(&format!("GET {key}")).await;
        lease.map(|lease| {
            let numbers = lease.split(':').take(2);
            numbers.map(|number| number.parse().unwrap()).collect()
        })
    }
}

const LEASES: [&str; 2] = [LEASE, APART[1]];

/// Returns the state that the model expects.
fn expected(state: &State) -> Seen {
    let server = &state.servers[0];
    let counter = server.keys.counter.as_ref().map(|counter| {
        let is_own = counter.replication_id == server.replication_id;
        (i64::from(counter.epoch), counter.n.map(i64::from), is_own)
    });
    let leases = server.keys.leases.each_ref().map(|lease| {
        let lease = lease.as_ref()?;
        let (epoch, n) = lease.stamp;
        let counted = i64::from(epoch) * Epoch::SIZE + i64::from(n);
        Some(vec![token(lease.token), counted])
    });
    (i64::from(state.databases[0].epoch), counter, leases)
}

/// Returns the token with which the model answers a call.
fn answer(after: &State, step: Step) -> Option<i64> {
    match after.holders[asks(step)?.0] {
        Holder::Holds(held) => Some(token(held)),
        _ => None,
    }
}

/// Returns the holder of a request whose caller may disconnect during it.
fn asks(step: Step) -> Option<Of> {
    match step {
        Step::Ask(Kind::Acquire | Kind::Renew { .. }, holder, _) => Some(holder),
        _ => None,
    }
}

/// Takes walks in which these losses occur.
async fn walks(seeds: u64, losses: &'static [Loss]) {
    let mut drawn = Drawn::default();
    for seed in 0..seeds {
        let world = Losses {
            losses,
            most: 5,
            apart: seed % 2 == 1,
            renewals: true,
            releases: true,
            new_tokens: 6,
            numbers: NUMBERS,
            ..Losses::default()
        };
        let mut real = Real::start(world.apart).await;
        let mut walk = Walk::begin(&world, seed, &mut drawn);
        for _ in 0..STEPS {
            let steps = world.calls(&walk.state);
            walk.were_possible(&steps);
            let Some(&step) = steps.choose(&mut walk.random) else {
                break;
            };
            let abandons = asks(step).filter(|_| walk.random.random_ratio(1, 6));
            let answered = real.take(step).await;
            let Some(holder) = abandons else {
                walk.reach(step, world.take(&walk.state, step));
                assert_eq!(answered, answer(&walk.state, step));
                assert_eq!(real.seen().await, expected(&walk.state));
                continue;
            };
            let after = world.take_abandoned(&walk.state, step, holder);
            walk.reach(step, walk.state.clone());
            walk.reach(Step::Abandon(holder), after);
            assert_eq!(real.seen().await, expected(&walk.state));
        }
    }
    drawn.are_all_but(&[]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn store_that_loses_its_keys_matches_the_model() {
    const LOSSES: &[Loss] = &[
        Loss::RedisIsFlushed,
        Loss::CounterIsEvicted,
        Loss::KeysAreCopiedBack,
        Loss::IssuerRestarts(0),
        Loss::IssuerRestarts(1),
    ];
    walks(60, LOSSES).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn store_that_restarts_matches_the_model() {
    const LOSSES: &[Loss] = &[
        Loss::RedisRestartsEmpty,
        Loss::RedisRestartsFromAnOldFile,
        Loss::RedisRestarts,
    ];
    walks(20, LOSSES).await;
}
