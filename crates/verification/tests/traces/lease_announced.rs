//! Random walks through the model of announced grants. Announced leases with a fence, and leases in
//! the database of the fence, execute the walks.

use rand::{RngExt, seq::IndexedRandom};
use sqlx::Postgres;
use tokio::sync::Mutex;
use tower_fence::{
    AdmitError, Fence, Resource, Token, TokenUse,
    lease::{Announced, LeaseAdmin, LeaseId, Leases, MemoryLeases, PostgresLeases, RedisLeases},
};
use tower_fence_model::lease::{
    Kind,
    last_word::{
        LastWord, Loss, Step,
        state::{Holder, State},
    },
};

use super::{
    lease_call::{call, real_token},
    walk::{Drawn, Walk},
};
use crate::support::{
    announced::NEIGHBOUR,
    database::{Fresh, TestDatabase},
    lease::{LONG, grant, sku},
    redis::{COUNTER, LEASE, RedisServer, connect_shared, dump, fresh_prefix, restore},
};

const STEPS: usize = 30;

/// The number of tokens in an epoch in the model.
const EPOCH: u8 = 16;

/// Returns the real token for a token of the model.
fn token(model: u8) -> i64 {
    real_token(model, EPOCH)
}

/// The real database, fence and issuers.
struct Real<L> {
    db: Fresh<Postgres>,
    fence: Fence<Postgres>,
    issuers: [L; 2],
    ids: Vec<LeaseId>,
}

/// The answer to a step: a token, or whether a write was admitted.
#[derive(Debug, PartialEq)]
enum Answer {
    Token(Option<i64>),
    Admitted(bool),
    Nothing,
}

impl<L: LeaseAdmin> Real<L> {
    fn new(db: Fresh<Postgres>, issuers: [L; 2]) -> Self {
        Self {
            fence: db.fence(),
            issuers,
            db,
            ids: (0..3).map(|_| LeaseId::random()).collect(),
        }
    }

    async fn take(&self, state: &State, step: Step) -> Answer {
        match step {
            Step::Ask(kind, holder, issuer) => {
                let issuer = &self.issuers[usize::from(issuer)];
                return Answer::Token(call(issuer, kind, &sku(), &self.ids[holder.0]).await);
            }
            Step::LeaseExpires { .. } => {
                assert!(self.issuers[0].break_lease(&sku(), None).await.unwrap());
            }
            Step::Writes(holder) => {
                let Holder::Holds(held) = state.holders[holder.0] else {
                    unreachable!("the holder has a lease")
                };
                return Answer::Admitted(self.write(held.token, TokenUse::SingleUse).await);
            }
            Step::Forge { token, reusable } => {
                let token_use = match reusable {
                    true => TokenUse::Reusable,
                    false => TokenUse::SingleUse,
                };
                return Answer::Admitted(self.write(token, token_use).await);
            }
            Step::Reads(_) => {}
            Step::NeighbourIsGranted => {
                let neighbour = Resource::new(NEIGHBOUR).unwrap();
                let lease = grant(&self.issuers[0], &neighbour, LONG).await;
                let released = self.issuers[0].release(&neighbour, &lease.id).await;
                released.unwrap();
            }
            other => unreachable!("{other:?} is not drawn"),
        }
        Answer::Nothing
    }

    /// Writes under a token. Returns whether it was admitted.
    async fn write(&self, model: u8, token_use: TokenUse) -> bool {
        let claimed = Token::new(token(model)).unwrap();
        match self.fence.begin(&sku(), claimed, token_use).await {
            Ok(tx) => {
                tx.commit().await.unwrap();
                true
            }
            Err(AdmitError::Stale(_)) => false,
            Err(error) => panic!("{error:?}"),
        }
    }

    /// Returns the highest stale token, the announced token, and the token of the lease.
    async fn seen(&self) -> (i64, i64, Option<i64>) {
        let of_row = async |column| {
            let sql = format!(
                "SELECT coalesce(max({column}), 0) FROM tower_fence.resources WHERE resource = '{}'",
                sku()
            );
            self.db.number(&sql).await
        };
        let held = self.issuers[0].inspect(&sku()).await.unwrap();
        let held = held.map(|held| held.token.get());
        (of_row("max_token").await, of_row("announced").await, held)
    }
}

/// Returns the state that the model expects.
fn expected(state: &State) -> (i64, i64, Option<i64>) {
    let row = &state.database;
    let held = state.servers[0].lease.map(|(_, held)| token(held));
    (token(row.max_token), token(row.announced), held)
}

fn answer(before: &State, after: &State, step: Step) -> Answer {
    match step {
        Step::Ask(Kind::Release, ..) => Answer::Token(None),
        Step::Ask(_, holder, _) => Answer::Token(match after.holders[holder.0] {
            Holder::Holds(held) => Some(token(held.token)),
            _ => None,
        }),
        Step::Writes(_) | Step::Forge { .. } => {
            Answer::Admitted(before.database.value != after.database.value)
        }
        _ => Answer::Nothing,
    }
}

fn bounds() -> LastWord {
    LastWord {
        forged: 1,
        next_is_forged: true,
        neighbours: 2,
        renewals: true,
        releases: true,
        new_tokens: 4,
        ..LastWord::default()
    }
}

/// Whether Redis can execute a step as the model does. A snapshot must contain a token counter. A
/// new epoch begins at the first grant, not at a restart.
fn can_be(state: &State, step: &Step) -> bool {
    let has_granted = !state.servers[0].counter.is_multiple_of(EPOCH);
    let needs_counter = matches!(
        step,
        Step::RedisIsSaved | Step::Lose(Loss::RedisRestarts | Loss::KeysAreCopiedBack)
    );
    has_granted || !needs_counter
}

/// Takes a step in the model. After the keys are restored, all issuers restart, because an issuer
/// that has a count in memory does not accept such keys.
fn next(world: &LastWord, state: &State, step: Step) -> State {
    let mut next = world.take(state, step);
    if step == Step::Lose(Loss::KeysAreCopiedBack) {
        for issuer in 0..2 {
            next = world.take(&next, Step::Lose(Loss::IssuerRestarts(issuer)));
        }
    }
    next
}

/// Takes walks. `real` creates the issuers of each walk, on a new database.
async fn walks<L: LeaseAdmin>(
    seeds: u64,
    world: LastWord,
    real: impl AsyncFn(Fresh<Postgres>) -> Real<L>,
    lose: impl AsyncFn(&mut Real<L>, Step),
) {
    let mut drawn = Drawn::default();
    for seed in 0..seeds {
        let mut real = real(Postgres::fresh(8).await).await;
        let mut walk = Walk::begin(&world, seed, &mut drawn);
        for _ in 0..STEPS {
            let mut steps = world.calls(&walk.state);
            steps.retain(|step| can_be(&walk.state, step));
            walk.were_possible(&steps);
            // If possible, half of the steps are reads and writes under a lease, because the
            // interesting steps follow them.
            let is_work = |step: &&Step| matches!(step, Step::Reads(_) | Step::Writes(_));
            let work: Vec<_> = steps.iter().filter(is_work).copied().collect();
            if !work.is_empty() && !walk.random.random::<bool>() {
                steps = work;
            }
            let Some(&step) = steps.choose(&mut walk.random) else {
                break;
            };
            let before = walk.reach(step, next(&world, &walk.state, step));
            let answered = match step {
                Step::RedisIsSaved | Step::Lose(_) => {
                    lose(&mut real, step).await;
                    Answer::Nothing
                }
                _ => real.take(&before, step).await,
            };
            assert_eq!(answered, answer(&before, &walk.state, step));
            assert_eq!(real.seen().await, expected(&walk.state));
        }
    }
    drawn.are_all_but(&[]);
}

async fn nothing<L>(_: &mut Real<L>, step: Step) {
    unreachable!("{step:?} is not drawn");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn announced_leases_in_redis_match_the_model() {
    let real = async |db: Fresh<Postgres>| {
        let prefix = fresh_prefix();
        let connect = async || {
            let leases = connect_shared(db.fence(), &prefix).await;
            leases.announced_to(db.fence())
        };
        let issuers = [connect().await, connect().await];
        Real::new(db, issuers)
    };
    walks(30, bounds(), real, nothing).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn announced_leases_match_the_model_despite_losses_of_redis() {
    const LOSSES: &[Loss] = &[
        Loss::RedisRestarts,
        Loss::KeysAreCopiedBack,
        Loss::IssuerRestarts(0),
        Loss::IssuerRestarts(1),
    ];
    let bounds = LastWord {
        losses: LOSSES,
        most: 4,
        ..bounds()
    };
    let redis = RedisServer::start(&[]).await;
    let connect = async |fence: Fence<Postgres>| {
        let leases = RedisLeases::connect(&redis.url(), fence.clone()).await;
        leases.unwrap().announced_to(fence)
    };
    let real = async |db: Fresh<Postgres>| {
        redis.command(&["FLUSHALL"]).await;
        let issuers = [connect(db.fence()).await, connect(db.fence()).await];
        Real::new(db, issuers)
    };
    let saved = Mutex::new(vec![]);
    let lose = async |real: &mut Real<Announced<RedisLeases, Fence<Postgres>>>, step| {
        let mut saved = saved.lock().await;
        let restarted = match step {
            Step::RedisIsSaved => {
                let held = real.issuers[0].inspect(&sku()).await.unwrap();
                let keys = [COUNTER, LEASE];
                *saved = dump(&redis, &keys[..1 + usize::from(held.is_some())]).await;
                return;
            }
            Step::Lose(Loss::IssuerRestarts(issuer)) => vec![issuer],
            Step::Lose(Loss::KeysAreCopiedBack) => vec![0, 1],
            _ => vec![],
        };
        if !matches!(step, Step::Lose(Loss::IssuerRestarts(_))) {
            redis.command(&["FLUSHALL"]).await;
        }
        if step == Step::Lose(Loss::KeysAreCopiedBack) {
            restore(&redis, &std::mem::take(&mut *saved)).await;
        }
        for issuer in restarted {
            real.issuers[usize::from(issuer)] = connect(real.db.fence()).await;
        }
    };
    walks(40, bounds, real, lose).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn announced_leases_in_the_process_match_the_model() {
    let real = async |db: Fresh<Postgres>| {
        let leases = MemoryLeases::new(db.fence());
        let issuers = [(); 2].map(|()| leases.clone().announced_to(db.fence()));
        Real::new(db, issuers)
    };
    walks(30, bounds(), real, nothing).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leases_in_postgres_match_the_model() {
    let bounds = LastWord {
        one_database: true,
        ..bounds()
    };
    let real = async |db: Fresh<Postgres>| {
        let issuers = [(); 2].map(|()| PostgresLeases::new(db.fence()));
        Real::new(db, issuers)
    };
    walks(20, bounds, real, nothing).await;
}
