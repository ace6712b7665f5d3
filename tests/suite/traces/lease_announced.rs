//! Walks through the model of the last word, taken by announced leases and a fence, and by leases in the fence's database.

use rand::{RngExt, SeedableRng, rngs::StdRng};
use sqlx::Postgres;
use tower_fence::{
    AdmitError, Fence, Token, TokenUse,
    lease::{
        Acquire, EmbeddedLeases, LeaseError, LeaseId, Operate, PostgresLeases, RedisLeases, Renew,
    },
};
use tower_fence_model::lease::last_word::{
    Bounds, LastWord, Step,
    state::{Holder, State},
};

use crate::support::{
    database::{Fresh, TestDatabase},
    lease::{LONG, sku},
    redis::{fresh_prefix, shared_url},
};

const STEPS: usize = 30;

/// How many tokens an epoch has in the model.
const EPOCH: u8 = 16;

/// The token of the model, as the store writes it.
fn token(model: u8) -> i64 {
    i64::from(model / EPOCH) * 1_000_000_000 + i64::from(model % EPOCH)
}

/// What the model walks through.
struct Real<L> {
    db: Fresh<Postgres>,
    fence: Fence<Postgres>,
    issuers: [L; 2],
    ids: Vec<LeaseId>,
}

/// What a step is answered: a token, or whether a write was admitted.
#[derive(Debug, PartialEq)]
enum Answer {
    Token(Option<i64>),
    Admitted(bool),
    Nothing,
}

impl<L: Operate> Real<L> {
    fn new(db: Fresh<Postgres>, issuers: [L; 2]) -> Self {
        Self {
            fence: db.fence(),
            issuers,
            db,
            ids: (0..3).map(|_| LeaseId::random()).collect(),
        }
    }

    async fn take(&self, state: &State, step: Step) -> Answer {
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
                    Ok(()) | Err(LeaseError::Lost { .. }) => return Answer::Nothing,
                    Err(error) => panic!("{error:?}"),
                }
            }
            Step::LeaseRunsOut { .. } => {
                assert!(self.issuers[0].break_lease(&sku()).await.unwrap());
                return Answer::Nothing;
            }
            Step::Writes(holder) => {
                let Holder::Holds(held) = state.holders[holder.0] else {
                    unreachable!("it holds a lease")
                };
                return Answer::Admitted(self.write(held.token).await);
            }
            Step::Forge { token } => return Answer::Admitted(self.write(token).await),
            Step::Reads(_) => return Answer::Nothing,
            other => unreachable!("{other:?} is not drawn"),
        };
        match answer {
            Ok(lease) => Answer::Token(Some(lease.token.get())),
            Err(LeaseError::Held { .. } | LeaseError::Lost { .. }) => Answer::Token(None),
            Err(error) => panic!("{error:?}"),
        }
    }

    /// Whether a write is admitted.
    async fn write(&self, model: u8) -> bool {
        let claimed = Token::new(token(model)).unwrap();
        match self.fence.begin(&sku(), claimed, TokenUse::SingleUse).await {
            Ok(tx) => {
                tx.commit().await.unwrap();
                true
            }
            Err(AdmitError::Stale(_)) => false,
            Err(error) => panic!("{error:?}"),
        }
    }

    /// What is dead, what was announced, and the token of the lease.
    async fn seen(&self) -> (i64, i64, Option<i64>) {
        let of_row = async |column| {
            let sql = format!("SELECT coalesce(max({column}), 0) FROM fence_resources");
            self.db.number(&sql).await
        };
        let held = self.issuers[0].inspect(&sku()).await.unwrap();
        let held = held.map(|held| held.token.get());
        (of_row("max_token").await, of_row("announced").await, held)
    }
}

/// The same, in the model.
fn expected(state: &State) -> (i64, i64, Option<i64>) {
    let row = &state.database;
    let held = state.servers[0].lease.map(|(_, held)| token(held));
    (token(row.max_token), token(row.announced), held)
}

fn answer(before: &State, after: &State, step: Step) -> Answer {
    match step {
        Step::Acquire { holder, .. } | Step::Renew { holder, .. } => {
            Answer::Token(match after.holders[holder.0] {
                Holder::Holds(held) => Some(token(held.token)),
                _ => None,
            })
        }
        Step::Writes(_) | Step::Forge { .. } => {
            Answer::Admitted(before.database.value != after.database.value)
        }
        _ => Answer::Nothing,
    }
}

async fn walk<L: Operate>(seed: u64, real: Real<L>, one_database: bool) {
    let world = LastWord::within(Bounds {
        one_database,
        forged: 1,
        renewals: true,
        releases: true,
        new_tokens: 4,
        ..Bounds::default()
    });
    let mut random = StdRng::seed_from_u64(seed);
    let (mut state, mut story) = (State::default(), vec![]);
    for _ in 0..STEPS {
        let steps = world.calls(&state);
        if steps.is_empty() {
            break;
        }
        // Half of the steps are work under a lease, as far as there is such: what comes after that is what matters.
        let is_work = |step: &&Step| matches!(step, Step::Reads(_) | Step::Writes(_));
        let work: Vec<_> = steps.iter().filter(is_work).copied().collect();
        let steps = match work.is_empty() || random.random() {
            true => steps,
            false => work,
        };
        let step = steps[random.random_range(0..steps.len())];
        let next = world.take(&state, step);
        story.push(step);
        let answered = real.take(&state, step).await;
        assert_eq!(
            (answered, real.seen().await),
            (answer(&state, &next, step), expected(&next)),
            "by seed {seed}, after {story:#?}"
        );
        state = next;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn announced_leases_in_redis_go_the_way_of_the_model() {
    for seed in 0..30 {
        let db = Postgres::fresh(4).await;
        let prefix = fresh_prefix();
        let connect = || async {
            let builder = RedisLeases::builder(db.fence()).key_prefix(&prefix);
            let leases = builder.connect(&shared_url()).await.unwrap();
            leases.announced_to(db.fence())
        };
        let issuers = [connect().await, connect().await];
        walk(seed, Real::new(db, issuers), false).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn announced_leases_in_the_process_go_the_way_of_the_model() {
    for seed in 0..30 {
        let db = Postgres::fresh(4).await;
        let leases = EmbeddedLeases::new(db.fence());
        let issuers = [(); 2].map(|()| leases.clone().announced_to(db.fence()));
        walk(seed, Real::new(db, issuers), false).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leases_in_postgres_go_the_way_of_the_model() {
    for seed in 0..20 {
        let db = Postgres::fresh(8).await;
        let issuers = [(); 2].map(|()| PostgresLeases::new(db.fence()));
        walk(seed, Real::new(db, issuers), true).await;
    }
}
