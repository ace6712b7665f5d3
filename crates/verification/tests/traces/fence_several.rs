//! Traces of the model of several resources, which the layer executes on Postgres and on SQLite.
//!
//! A request locks its rows immediately if no other request has locked them. On Postgres, one
//! request may wait for each row, and proceeds as soon as it can proceed in the model. Also on
//! Postgres, a handler may fail together with its connection. The raise is then late, because it
//! waits for another connection.

use std::collections::HashMap;

use axum::{
    Router,
    body::Body,
    http::{Request, StatusCode},
    routing::post,
};
use futures_util::{FutureExt, future::BoxFuture};
use rand::{RngExt, seq::IndexedRandom};
use sqlx::{Pool, Postgres, Sqlite, pool::PoolConnection, postgres::PgPoolOptions};
use tower_fence::{Fence, FenceLayer, PathParam};
use tower_fence_model::{
    Model,
    fence::several::{Attempt, Resource, Several, State, Step, Who},
};

use super::{
    call::{Call, Event, follow},
    fence_real::{max_token_of_row, stock},
    sessions::{SESSION, end_sessions, sessions_wait},
    walk::{Drawn, Walk, possible},
};
use crate::support::{
    PATIENCE,
    database::{Fresh, TestDatabase},
    fence::{resource, token},
};

const TRACES: u64 = 60;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn layer_on_postgres_matches_the_model_of_several_resources() {
    let db = Postgres::fresh(4).await;
    let mut pools = vec![];
    for _ in Who::ALL {
        let pool = PgPoolOptions::new().max_connections(1);
        let pool = pool.acquire_timeout(PATIENCE).connect(&db.url).await;
        pools.push(pool.unwrap());
    }
    let (waited, failed_late) = take_traces(&db, &pools).await;
    assert!(waited > 20 && failed_late > 5, "{waited}, {failed_late}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn layer_on_sqlite_matches_the_model_of_several_resources() {
    let db = Sqlite::fresh(4).await;
    let pools = vec![db.pool.clone(); Who::ALL.len()];
    take_traces(&db, &pools).await;
}

/// Returns the number of requests that waited, and the number of requests that failed with their
/// connections.
async fn take_traces<DB: TestDatabase>(db: &Fresh<DB>, pools: &[Pool<DB>]) -> (usize, usize) {
    let world = Several::small();
    let mut drawn = Drawn::default();
    let (mut waited, mut failed_late) = (0, 0);
    for seed in 0..TRACES {
        let walk = Walk::begin(&world, seed, &mut drawn);
        let trace = Trace::begin(db, pools, walk).await.run().await;
        waited += trace.waited;
        failed_late += trace.failed_late;
    }
    drawn.are_all_but(&[]);
    (waited, failed_late)
}

/// One trace, on two resources of its own.
struct Trace<'a, DB: TestDatabase> {
    db: &'a Fresh<DB>,
    walk: Walk<'a, Several>,
    names: [tower_fence::Resource; 2],
    /// The pool of each request. On Postgres, each has a pool of its own with one connection.
    pools: &'a [Pool<DB>],
    services: Vec<Router>,
    calls: HashMap<Who, Call<DB>>,
    /// The connection that a raise waits for.
    kept: Option<PoolConnection<DB>>,
    waited: usize,
    failed_late: usize,
}

impl<'a, DB: TestDatabase> Trace<'a, DB> {
    async fn begin(db: &'a Fresh<DB>, pools: &'a [Pool<DB>], walk: Walk<'a, Several>) -> Self {
        let names = ["r", "s"].map(|name| resource(&format!("{}-{name}", walk.seed)));
        for (name, amount) in names.iter().zip(walk.state.amounts) {
            // The model begins with a row.
            db.fence().raise(name, token(1)).await.unwrap();
            let insert = format!("INSERT INTO stock VALUES ('{name}', {amount})");
            db.execute(&insert).await;
        }
        let services = pools.iter().map(|pool| {
            let fence = Fence::builder()
                .lock_timeout(PATIENCE)
                .hold_timeout(PATIENCE)
                .build(pool.clone());
            let one = FenceLayer::new(fence.clone(), PathParam("sku"));
            let both = FenceLayer::new(fence, [PathParam("from"), PathParam("to")]);
            Router::new()
                .route("/{sku}", post(follow::<DB>).route_layer(one))
                .route("/{from}/{to}", post(follow::<DB>).route_layer(both))
        });
        Self {
            db,
            walk,
            names,
            pools,
            services: services.collect(),
            calls: HashMap::new(),
            kept: None,
            waited: 0,
            failed_late: 0,
        }
    }

    /// Takes steps until none is possible.
    async fn run(mut self) -> Self {
        while let Some(steps) = self.draw() {
            let before = self.walk.state.clone();
            for step in &steps {
                self.walk.go(*step);
            }
            self.take(&steps).await;
            // The requests that waited for the released rows are admitted or refused by now.
            while let Some(admit) = next_admission(self.walk.world, &self.walk.state) {
                self.walk.go(admit);
            }
            self.hear(&before).await;
            self.compare().await;
        }
        self
    }

    fn draw(&mut self) -> Option<Vec<Step>> {
        let steps = self.walk.possible();
        let (mut draws, mut waiting) = (vec![], vec![]);
        for step in steps {
            match step {
                Step::Begin(who) => match self.may_begin(who) {
                    Some(true) => waiting.push(vec![step]),
                    Some(false) => draws.push(vec![step]),
                    None => {}
                },
                Step::Fail(who) => {
                    let rows = who.resources();
                    if self
                        .waiters(&self.walk.state)
                        .all(|waiter| apart(&waiter.1, rows))
                    {
                        draws.push(vec![step, Step::AnswerFailure(who)]);
                    }
                    // On SQLite, the raise would not wait for another connection.
                    if DB::ABORTS_ON_ERROR {
                        draws.push(vec![step]);
                    }
                }
                _ => draws.push(vec![step]),
            }
        }
        // The interesting case: a request has to wait, and another one arrives in the meantime.
        if !waiting.is_empty() && (draws.is_empty() || self.walk.random.random_bool(0.6)) {
            return waiting.choose(&mut self.walk.random).cloned();
        }
        let comes = |draw: &Vec<Step>| matches!(draw[0], Step::Begin(_));
        let has_waiters = self.waiters(&self.walk.state).next().is_some();
        if has_waiters && draws.iter().any(comes) && self.walk.random.random_bool(0.7) {
            draws.retain(comes);
        }
        draws.choose(&mut self.walk.random).cloned()
    }

    /// Whether a request would wait. `None` if chance would decide which request locks the rows
    /// next.
    fn may_begin(&self, who: Who) -> Option<bool> {
        let begun = self
            .walk
            .world
            .next_state(&self.walk.state, Step::Begin(who));
        let mut state = begun.unwrap();
        while let Some(admit) = next_admission(self.walk.world, &state) {
            state = self.walk.world.next_state(&state, admit).unwrap();
        }
        let waiters: Vec<_> = self.waiters(&state).collect();
        let Some((_, rows)) = waiters.iter().find(|waiter| waiter.0 == who) else {
            // On SQLite, each transaction waits for the writer.
            let is_free = !self.walk.state.attempts.into_iter().any(is_open);
            return (DB::ABORTS_ON_ERROR || is_free).then_some(false);
        };
        let mut others = waiters.iter().filter(|waiter| waiter.0 != who);
        // A request that is already stale does not wait.
        let is_stale = |row: &Resource| self.walk.state.max_token[*row as usize] >= who.token();
        let is_clear = others.all(|other| apart(&other.1, rows)) && !rows.iter().any(is_stale);
        (DB::ABORTS_ON_ERROR && is_clear).then_some(true)
    }

    /// Returns the requests that wait for a row, each with the rows that it has not locked yet.
    fn waiters(&self, state: &State) -> impl Iterator<Item = (Who, Vec<Resource>)> {
        let waiters = Who::ALL.into_iter().filter_map(|who| {
            let Attempt::Admitting(locked, _) = state.attempts[who as usize] else {
                return None;
            };
            let mut rows = who.resources().to_vec();
            rows.sort();
            let rows = rows.split_off(locked);
            (!rows.is_empty()).then_some((who, rows))
        });
        waiters.collect::<Vec<_>>().into_iter()
    }

    async fn take(&mut self, steps: &[Step]) {
        match steps[0] {
            Step::Begin(who) => self.send(who),
            Step::Commit(who) => {
                let moved = i64::from(who.resources().len() == 2);
                for (resource, change) in who.resources().iter().zip([-moved, moved]) {
                    let name = &self.names[*resource as usize];
                    let sql = format!(
                        "UPDATE stock SET n = n + {change} WHERE sku = '{name}' RETURNING n"
                    );
                    assert!(self.call(who).run(&sql).await.is_some());
                }
                self.answers(who, StatusCode::CREATED).await;
            }
            Step::Fail(who) if steps.len() == 1 => self.fail_late(who).await,
            Step::Fail(who) => self.answers(who, StatusCode::CONFLICT).await,
            Step::AnswerFailure(who) => {
                self.kept = None;
                let answer = self.call(who).next_answer().await;
                assert_eq!(answer.status, StatusCode::CONFLICT);
            }
            Step::Admit(..) => unreachable!("an admission follows another step"),
        }
    }

    fn send(&mut self, who: Who) {
        let rows = who.resources().iter();
        let rows: Vec<&str> = rows.map(|row| self.names[*row as usize].as_str()).collect();
        let tokens = rows
            .iter()
            .map(|row| format!("{};resource=\"{row}\"", who.token()));
        let post = Request::post(format!("/{}", rows.join("/")))
            .header("Fencing-Token", tokens.collect::<Vec<_>>().join(", "))
            .body(Body::empty())
            .unwrap();
        let service = self.services[who as usize].clone();
        self.calls.insert(who, Call::send(service, post));
    }

    async fn answers(&mut self, who: Who, status: StatusCode) {
        let answer = self.call(who).answer(status, "").await;
        assert_eq!(answer.status, status, "{answer:?}");
    }

    /// Ends the session of a request, and makes its handler fail. The raise waits for another
    /// connection.
    async fn fail_late(&mut self, who: Who) {
        let session = self.call(who).run(SESSION).await.unwrap();
        let pool = &self.pools[who as usize];
        // This acquisition of a connection is queued before that of the raise.
        let mut next: BoxFuture<_> = pool.acquire().boxed();
        assert!((&mut next).now_or_never().is_none());
        end_sessions(self.db, &format!("pid = {session}")).await;
        self.call(who).order_answer(StatusCode::CONFLICT, "");
        self.kept = Some(next.await.unwrap());
        self.failed_late += 1;
    }

    /// Checks the requests that were admitted or refused by the last steps.
    async fn hear(&mut self, before: &State) {
        let waiters: Vec<Who> = self
            .waiters(&self.walk.state)
            .map(|waiter| waiter.0)
            .collect();
        for who in Who::ALL {
            let was_open = match before.attempts[who as usize] {
                Attempt::None => false,
                _ => self.waiters(before).all(|waiter| waiter.0 != who),
            };
            let attempt = self.walk.state.attempts[who as usize];
            if was_open || attempt == Attempt::None {
                continue;
            }
            if waiters.contains(&who) {
                self.waited += usize::from(before.attempts[who as usize] == Attempt::None);
                assert!(self.calls[&who].is_silent());
                continue;
            }
            match (attempt, self.call(who).next().await) {
                (Attempt::Admitting(..), Event::Called) => {}
                (Attempt::Over, Event::Answered(answer))
                    if answer.status == StatusCode::PRECONDITION_FAILED => {}
                (_, other) => panic!("{other:?}"),
            }
        }
        if DB::ABORTS_ON_ERROR {
            sessions_wait(self.db, waiters.len()).await;
        }
    }

    async fn compare(&self) {
        let state = &self.walk.state;
        for (place, name) in self.names.iter().enumerate() {
            let n = stock(self.db, name).await;
            assert_eq!(n, i64::from(state.amounts[place]), "{name}");
            let max_token = max_token_of_row(self.db, name).await;
            assert_eq!(max_token, Some(state.max_token[place].into()), "{name}");
        }
    }

    fn call(&mut self, who: Who) -> &mut Call<DB> {
        self.calls.get_mut(&who).unwrap()
    }
}

fn next_admission(world: &Several, state: &State) -> Option<Step> {
    let mut steps = possible(world, state).into_iter();
    steps.find(|step| matches!(step, Step::Admit(..)))
}

/// Whether the two requests have no common resource.
fn apart(some: &[Resource], others: &[Resource]) -> bool {
    !some.iter().any(|resource| others.contains(resource))
}

const fn is_open(attempt: Attempt) -> bool {
    matches!(attempt, Attempt::Admitting(..))
}
