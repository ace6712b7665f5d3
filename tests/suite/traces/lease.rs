//! Walks through the model of leases and what they lose, taken by the store in Redis.

use rand::{RngExt, SeedableRng, rngs::StdRng};
use sqlx::Sqlite;
use tower_fence::lease::{Acquire, LeaseError, LeaseId, Leases, RedisLeases, Renew};
use tower_fence_model::lease::losses::{
    Bounds, Loss, Losses, Step,
    state::{Holder, State},
};

use crate::support::{
    database::{Fresh, TestDatabase},
    eventually,
    lease::{LONG, sku},
    redis::{CLOCK, LEASE, RedisServer, dump, restore},
};

const STEPS: usize = 30;

/// A clock's number is below this in the model.
const NUMBERS: u8 = 32;

/// The token of the model, as the store writes it.
fn token(model: u8) -> i64 {
    i64::from(model / NUMBERS) * 1_000_000_000 + i64::from(model % NUMBERS)
}

/// What there is: the epoch of the database; the clock's epoch and number, and whether it belongs to the history of
/// the server; the token and the stamp of the lease.
type Seen = (i64, Option<(i64, Option<i64>, bool)>, Option<Vec<i64>>);

/// What the model walks through.
struct Real {
    redis: RedisServer,
    db: Fresh<Sqlite>,
    issuers: Vec<RedisLeases>,
    ids: Vec<LeaseId>,
    saved: Vec<(String, Vec<u8>)>,
}

impl Real {
    async fn start() -> Self {
        let mut real = Self {
            redis: RedisServer::start(&[]).await,
            db: Sqlite::fresh(4).await,
            issuers: vec![],
            ids: (0..3).map(|_| LeaseId::random()).collect(),
            saved: vec![],
        };
        for _ in 0..2 {
            let issuer = real.issuer().await;
            real.issuers.push(issuer);
        }
        real
    }

    async fn issuer(&self) -> RedisLeases {
        let url = self.redis.url();
        RedisLeases::connect(&url, self.db.fence()).await.unwrap()
    }

    /// Takes a step, and returns the token that was answered.
    async fn take(&mut self, step: Step) -> Option<i64> {
        let issuer = |number: u8| &self.issuers[usize::from(number)];
        let answer = match step {
            Step::Acquire { holder, issuer: of } => {
                let request = Acquire::new(LONG).lease_id(self.ids[holder.0].clone());
                issuer(of).acquire(&sku(), request).await
            }
            Step::Renew {
                holder,
                issuer: of,
                new_token,
            } => {
                let mut request = Renew::new(LONG);
                if new_token {
                    request = request.with_new_token();
                }
                issuer(of).renew(&sku(), &self.ids[holder.0], request).await
            }
            Step::Release { holder, issuer: of } => {
                match issuer(of).release(&sku(), &self.ids[holder.0]).await {
                    Ok(()) | Err(LeaseError::Lost { .. }) => {}
                    Err(error) => panic!("{error:?}"),
                }
                return None;
            }
            Step::LeaseRunsOut { .. } => {
                self.redis.command(&["DEL", LEASE]).await;
                return None;
            }
            Step::RedisIsSaved => {
                self.saved = self.keys().await;
                return None;
            }
            Step::Lose(loss) => {
                self.lose(loss).await;
                return None;
            }
            other => unreachable!("{other:?} is not drawn"),
        };
        match answer {
            Ok(lease) => Some(lease.token.get()),
            Err(LeaseError::Held { .. } | LeaseError::Lost { .. }) => None,
            Err(error) => panic!("{error:?}"),
        }
    }

    async fn lose(&mut self, loss: Loss) {
        let kept = match loss {
            Loss::RedisRestarts => self.keys().await,
            Loss::RedisRestartsFromAnOldFile | Loss::KeysAreCopiedBack => {
                std::mem::take(&mut self.saved)
            }
            Loss::ClockIsEvicted => {
                self.redis.command(&["DEL", CLOCK]).await;
                return;
            }
            Loss::IssuerRestarts(issuer) => {
                self.issuers[usize::from(issuer)] = self.issuer().await;
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
                // Their connections have died. What was sent on one might have had its effect.
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
        for key in [CLOCK, LEASE] {
            if self.redis.command(&["EXISTS", key]).await == redis::Value::Int(1) {
                there.push(key);
            }
        }
        dump(&self.redis, &there).await
    }

    async fn seen(&self) -> Seen {
        let epoch = "SELECT coalesce(max(epoch), 0) FROM fence_epochs";
        let fields = ["HMGET", CLOCK, "history", "epoch", "n"];
        let fields: Vec<Option<String>> =
            redis::from_redis_value(self.redis.command(&fields).await).unwrap();
        let info = self.redis.info("INFO replication").await;
        let number = |text: &String| text.parse::<i64>().unwrap();
        let clock = fields[1].as_ref().map(|epoch| {
            let history = fields[0].as_ref().unwrap();
            let is_own = info.contains(&format!("master_replid:{history}"));
            (number(epoch), fields[2].as_ref().map(number), is_own)
        });
        let lease: Option<String> =
            redis::from_redis_value(self.redis.command(&["GET", LEASE]).await).unwrap();
        let lease = lease.map(|lease| {
            let numbers = lease.split(':').take(3);
            numbers.map(|number| number.parse().unwrap()).collect()
        });
        (self.db.number(epoch).await, clock, lease)
    }
}

/// The same, in the model.
fn expected(state: &State) -> Seen {
    let server = &state.servers[0];
    let clock = server.keys.clock.as_ref().map(|clock| {
        let is_own = clock.history == server.history;
        (i64::from(clock.epoch), clock.n.map(i64::from), is_own)
    });
    let lease = server.keys.leases[0].as_ref().map(|lease| {
        let (epoch, n) = lease.stamp;
        vec![token(lease.token), i64::from(epoch), i64::from(n)]
    });
    (i64::from(state.databases[0].epoch), clock, lease)
}

/// The token that a call is answered.
fn answer(before: &State, after: &State, step: Step) -> Option<i64> {
    let (Step::Acquire { holder, .. } | Step::Renew { holder, .. }) = step else {
        return None;
    };
    match (before.holders[holder.0], after.holders[holder.0]) {
        (_, Holder::Holds(held)) => Some(token(held)),
        _ => None,
    }
}

async fn walk(seed: u64, losses: &'static [Loss]) {
    let world = Losses::within(Bounds {
        losses,
        most: 5,
        renewals: true,
        releases: true,
        new_tokens: 6,
        numbers: NUMBERS,
        ..Bounds::default()
    });
    let mut random = StdRng::seed_from_u64(seed);
    let (mut state, mut real, mut story) = (State::default(), Real::start().await, vec![]);
    for _ in 0..STEPS {
        let steps = world.calls(&state);
        if steps.is_empty() {
            break;
        }
        let step = steps[random.random_range(0..steps.len())];
        let next = world.take(&state, step);
        story.push(step);
        let answered = real.take(step).await;
        assert_eq!(
            (answered, real.seen().await),
            (answer(&state, &next, step), expected(&next)),
            "by seed {seed}, after {story:#?}"
        );
        state = next;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_that_loses_its_keys_goes_the_way_of_the_model() {
    const LOSSES: &[Loss] = &[
        Loss::RedisIsFlushed,
        Loss::ClockIsEvicted,
        Loss::KeysAreCopiedBack,
        Loss::IssuerRestarts(0),
        Loss::IssuerRestarts(1),
    ];
    for seed in 0..60 {
        walk(seed, LOSSES).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_that_restarts_goes_the_way_of_the_model() {
    const LOSSES: &[Loss] = &[
        Loss::RedisRestartsEmpty,
        Loss::RedisRestartsFromAnOldFile,
        Loss::RedisRestarts,
    ];
    for seed in 0..20 {
        walk(seed, LOSSES).await;
    }
}
