//! Traces of the model of idempotency keys, which the layer executes on Postgres and on SQLite.
//!
//! A claim and the admission that follows it are one call. On Postgres, another session sometimes
//! locks the row, so that the call waits between its claim and its admission. At any time, one
//! further request may wait for the key. It proceeds as soon as the key is free in the model.

use std::collections::HashMap;

use axum::{
    Router,
    body::Body,
    http::{Request as HttpRequest, StatusCode},
    routing::post,
};
use rand::{RngExt, seq::IndexedRandom};
use sqlx::{Postgres, Sqlite, pool::PoolConnection};
use tower_fence::{FenceLayer, Idempotency, PathParam, Resource, TokenUse};
use tower_fence_model::{
    Model,
    fence::keys::{Attempt, Body as Meaning, HIGHEST_STALE, Keys, Request, State, Step},
};

use super::{
    call::{Answer, Call, Event, follow},
    fence_failover::{self, Standby},
    fence_real::{max_token_of_row, stock},
    sessions::{IN_TRANSACTION, SESSION, end_sessions, sessions_wait},
    walk::{Drawn, Walk, possible},
};
use crate::support::{
    PATIENCE,
    database::{Fresh, TestDatabase},
    fence::token,
};

/// The number of traces for each kind of token, single-use and reusable.
const TRACES: u64 = 60;

/// The token of the holder.
const TOKEN: i64 = 1;
/// The token of a newer holder.
const NEWER: i64 = 2;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn layer_on_postgres_matches_the_model_of_keys() {
    take_traces::<Postgres>(&[]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn layer_on_sqlite_matches_the_model_of_keys() {
    // SQLite has no sessions that can be lost.
    take_traces::<Sqlite>(&["CommitFails"]).await;
}

async fn take_traces<DB: TestDatabase>(never: &[&str]) {
    let db = DB::fresh(12).await;
    let mut drawn = Drawn::default();
    let mut waited = 0;
    for single_use in [true, false] {
        for seed in 0..TRACES {
            let world = Keys {
                single_use: vec![single_use],
                failovers: u8::from(DB::ABORTS_ON_ERROR && seed.is_multiple_of(3)),
                ..Keys::large()
            };
            let walk = Walk::begin(&world, seed, &mut drawn);
            waited += Trace::begin(&db, walk).await.run().await;
        }
    }
    drawn.are_all_but(never);
    assert!(waited > 5, "{waited}");
}

/// The next steps that may be drawn.
#[derive(Clone)]
enum Draw {
    /// A step, together with the other steps of the same call.
    Steps(Vec<Step>),
    /// A request that must wait for the key. The model has no such step.
    Wait(Request),
}

/// One trace, on a resource and a key of its own.
struct Trace<'a, DB: TestDatabase> {
    db: &'a Fresh<DB>,
    walk: Walk<'a, Keys>,
    name: Resource,
    /// The service of each request. Either all requests share one service, like requests to one
    /// process, or each request has its own.
    services: [Router; 4],
    calls: HashMap<Request, Call<DB>>,
    /// The session that has locked the row, between a claim and its admission.
    gate: Option<PoolConnection<DB>>,
    /// The state that a failover would leave.
    standby: Option<Standby>,
    /// Whether a process may have cached that the token is stale.
    was_stale: bool,
    /// The request that waits for the key.
    waiting: Option<Request>,
    /// The number of requests that waited for the key.
    waited: usize,
}

impl<'a, DB: TestDatabase> Trace<'a, DB> {
    async fn begin(db: &'a Fresh<DB>, walk: Walk<'a, Keys>) -> Self {
        let single_use = walk.world.single_use[0];
        let name = Resource::new(format!("{single_use}-{}", walk.seed)).unwrap();
        if DB::ABORTS_ON_ERROR {
            fence_failover::forget(db).await;
        }
        // The model begins with a row.
        db.fence().raise(&name, token(1)).await.unwrap();
        db.execute(&format!("INSERT INTO stock VALUES ('{name}', 0)"))
            .await;
        let service = || {
            let fence = db.fence_with(|fence| fence.lock_timeout(PATIENCE).hold_timeout(PATIENCE));
            let keys = Idempotency::required().wait(PATIENCE);
            let mut layer = FenceLayer::new(fence, PathParam("sku")).idempotent(keys);
            if !single_use {
                layer = layer.reusable();
            }
            Router::new()
                .route("/{sku}", post(follow::<DB>))
                .route_layer(layer)
        };
        let one = service();
        let one_process = walk.seed.is_multiple_of(4);
        let services = [(); 4].map(|()| match one_process {
            true => one.clone(),
            false => service(),
        });
        Self {
            db,
            walk,
            name,
            services,
            calls: HashMap::new(),
            gate: None,
            standby: None,
            was_stale: false,
            waiting: None,
            waited: 0,
        }
    }

    /// Takes steps until none is possible. Returns the number of requests that waited.
    async fn run(mut self) -> usize {
        while let Some(draw) = self.draw() {
            match draw {
                Draw::Wait(request) => self.wait(request).await,
                Draw::Steps(steps) => {
                    let before = self.walk.state.clone();
                    for step in &steps {
                        self.walk.go(*step);
                    }
                    self.take(&steps, &before).await;
                }
            }
            if let Some(waiting) = self.waiting
                && !possible(self.walk.world, &self.walk.state).contains(&Step::Claim(waiting))
            {
                assert!(self.calls[&waiting].is_silent());
            }
            self.is_refused_under_another_key().await;
            self.compare().await;
        }
        self.waited
    }

    /// If the token is stale and the row is free, sends a request under another key, which is
    /// refused. The process then has cached the refusal, and must still replay the response under
    /// the first key.
    async fn is_refused_under_another_key(&mut self) {
        let is_stale = TOKEN <= self.walk.state.max_token.into();
        self.was_stale |= is_stale;
        if is_stale && self.waiting.is_none() && !self.walk.state.attempts.into_iter().any(has_key)
        {
            let post = self.post(Request::First, "another");
            let mut call = Call::<DB>::send(self.services[0].clone(), post);
            let answer = call.next_answer().await;
            assert_eq!(answer.status, StatusCode::PRECONDITION_FAILED);
        }
    }

    fn draw(&mut self) -> Option<Draw> {
        let steps = self.walk.possible();
        // If a waiting request can proceed, the database is ahead of the model. The claim of this
        // request is therefore the next step.
        if let Some(waiting) = self.waiting
            && steps.contains(&Step::Claim(waiting))
        {
            return Some(Draw::Steps(self.whole(Step::Claim(waiting))));
        }
        let has_sessions = DB::ABORTS_ON_ERROR;
        let mut draws = vec![];
        for step in steps {
            match step {
                Step::Claim(_) => {
                    draws.push(Draw::Steps(self.whole(step)));
                    // A stale request does not wait for the row. If the database has not yet
                    // detected a failover, the request first moves the tokens up.
                    let waits =
                        TOKEN > self.walk.state.max_token.into() && !self.walk.state.is_behind;
                    if has_sessions && waits {
                        draws.push(Draw::Steps(vec![step]));
                    }
                }
                // Afterwards the row is free, so the claim is admitted or refused.
                Step::NewerWrites if self.gate.is_some() => {
                    let claimed =
                        |one: &Request| self.walk.state.attempts[*one as usize] == Attempt::Claimed;
                    let claimed = Request::ALL.into_iter().find(claimed).unwrap();
                    draws.push(Draw::Steps(vec![step, Step::Admit(claimed)]));
                }
                Step::CommitFails(_) if !has_sessions => {}
                // On SQLite, the raise would wait for the waiting request.
                Step::Fail(_) if !has_sessions && self.waiting.is_some() => {}
                // It would depend on chance whether the waiting request proceeds first.
                Step::Crash | Step::FailOver if self.waiting.is_some() => {}
                _ => draws.push(Draw::Steps(vec![step])),
            }
        }
        if self.waiting.is_none() && self.walk.state.attempts.into_iter().any(has_key) {
            let sent =
                |request: &Request| self.walk.state.attempts[*request as usize] == Attempt::Sent;
            draws.extend(Request::ALL.into_iter().filter(sent).map(Draw::Wait));
        }
        // After one of these steps, few other steps are possible. Therefore these steps are drawn
        // less often.
        for (late, share) in [
            (Step::NewerWrites, 0.85),
            (Step::Crash, 0.5),
            (Step::FallBehind, 0.8),
            (Step::FailOver, 0.9),
        ] {
            let is_late = |draw: &Draw| matches!(draw, Draw::Steps(steps) if steps[0] == late);
            if !draws.iter().all(is_late) && self.walk.random.random_bool(share) {
                draws.retain(|draw| !is_late(draw));
            }
        }
        draws.choose(&mut self.walk.random).cloned()
    }

    /// Returns a claim with the steps that follow it in the same call.
    fn whole(&self, claim: Step) -> Vec<Step> {
        let Step::Claim(request) = claim else {
            unreachable!("{claim:?}");
        };
        let claimed = self.walk.world.next_state(&self.walk.state, claim).unwrap();
        match claimed.attempts[request as usize] {
            Attempt::Claimed if claimed.is_behind => {
                vec![claim, Step::CatchUp, Step::Admit(request)]
            }
            Attempt::Claimed => vec![claim, Step::Admit(request)],
            _ => vec![claim],
        }
    }

    fn post(&self, request: Request, key: &str) -> HttpRequest<Body> {
        let body = format!("{:?}", request.body());
        HttpRequest::post(format!("/{}", self.name))
            .header("Fencing-Token", TOKEN)
            .header("Idempotency-Key", format!("\"{key}\""))
            .body(Body::from(body))
            .unwrap()
    }

    fn send(&mut self, request: Request) {
        let post = self.post(request, self.name.as_str());
        let service = self.services[request as usize].clone();
        self.calls.insert(request, Call::send(service, post));
    }

    async fn wait(&mut self, request: Request) {
        self.send(request);
        self.waiting = Some(request);
        self.waited += 1;
    }

    async fn take(&mut self, steps: &[Step], before: &State) {
        match steps[0] {
            Step::Claim(request) => {
                let is_new = self.waiting.take_if(|one| *one == request).is_none();
                let stays = self.walk.state.attempts[request as usize] == Attempt::Claimed;
                if stays {
                    self.close_gate().await;
                }
                if is_new {
                    self.send(request);
                }
                match stays {
                    true => self.waits_for_row(request).await,
                    false => self.goes_on(request, before).await,
                }
                // The request may have been refused from the cache, and then has not moved the
                // tokens up in the database.
                if self.was_stale && steps.contains(&Step::CatchUp) {
                    fence_failover::catch_up(self.db, &self.name).await;
                }
            }
            Step::Admit(request) => {
                let mut gate = self.gate.take().unwrap();
                DB::execute(&mut gate, "ROLLBACK").await.unwrap();
                self.goes_on(request, before).await;
            }
            Step::Write(request) => {
                let name = &self.name;
                let sql = format!("UPDATE stock SET n = n + 1 WHERE sku = '{name}' RETURNING n");
                let n = self.call(request).run(&sql).await;
                let expected = Attempt::Written(n.unwrap().try_into().unwrap());
                assert_eq!(self.walk.state.attempts[request as usize], expected);
            }
            Step::Commit(request) => {
                let answer = self.succeed(request, before).await;
                assert_eq!(answer.status, StatusCode::CREATED);
                assert!(!answer.is_replay);
            }
            Step::CommitUnheard(request) => drop(self.succeed(request, before).await),
            Step::CommitFails(request) => {
                let session = self.call(request).run(SESSION).await.unwrap();
                end_sessions(self.db, &format!("pid = {session}")).await;
                let answer = self.succeed(request, before).await;
                assert!(answer.status.is_server_error(), "{answer:?}");
            }
            Step::Fail(request) => {
                let status = StatusCode::CONFLICT;
                let answer = self.call(request).answer(status, "").await;
                assert_eq!(answer.status, status);
            }
            Step::GoAway(request) => self.calls.remove(&request).unwrap().cancel().await,
            Step::NewerWrites => {
                self.newer_writes().await;
                if let [_, Step::Admit(request)] = steps {
                    self.goes_on(*request, before).await;
                }
            }
            Step::Expire => {
                let expire = format!(
                    "UPDATE tower_fence.idempotency_keys SET expires_at = {} WHERE key = '{}'",
                    in_hours::<DB>(-1),
                    self.name
                );
                self.db.execute(&expire).await;
                if self.walk.random.random() {
                    assert!(self.db.fence().remove_expired_keys().await.unwrap() > 0);
                }
            }
            Step::Crash => self.crash(before).await,
            Step::FallBehind => {
                let names = std::slice::from_ref(&self.name);
                self.standby = Some(Standby::of(self.db, names).await);
            }
            Step::FailOver => {
                if before.attempts.into_iter().any(has_key) {
                    self.crash(before).await;
                }
                let standby = self.standby.take().unwrap();
                standby.promote(self.db).await;
            }
            Step::CatchUp => fence_failover::catch_up(self.db, &self.name).await,
            // A sent request has not reached the database yet.
            Step::Send(_) => {}
            Step::Record(_) => unreachable!("a record is part of the write"),
        }
    }

    /// Waits until a request waits for the row.
    async fn waits_for_row(&mut self, request: Request) {
        let db = self.db;
        tokio::select! {
            () = sessions_wait(db, 1) => {}
            event = self.call(request).next() => panic!("{event:?}"),
        }
    }

    /// Waits until a request is admitted or answered, and checks the result.
    async fn goes_on(&mut self, request: Request, before: &State) {
        if self.walk.state.attempts[request as usize] == Attempt::Admitted {
            return assert_eq!(self.call(request).next().await, Event::Called);
        }
        let answer = self.call(request).next_answer().await;
        let expected = match before.record {
            Some(record) if record.body == request.body() => StatusCode::CREATED,
            Some(_) => StatusCode::UNPROCESSABLE_ENTITY,
            None => StatusCode::PRECONDITION_FAILED,
        };
        assert_eq!(answer.status, expected, "{answer:?}");
        if expected == StatusCode::CREATED {
            let stored = before.record.and_then(|record| record.answer).unwrap();
            assert_eq!(answer.text, text(request.body(), stored));
            assert!(answer.is_replay);
        }
    }

    /// Makes the handler answer with a success.
    async fn succeed(&mut self, request: Request, before: &State) -> Answer {
        let Attempt::Written(n) = before.attempts[request as usize] else {
            unreachable!("the request has written");
        };
        let text = text(request.body(), n);
        self.call(request).answer(StatusCode::CREATED, &text).await
    }

    /// Locks the row until the next claim may be admitted.
    async fn close_gate(&mut self) {
        let mut gate = self.db.pool.acquire().await.unwrap();
        let lock = format!(
            "BEGIN; SELECT 1 FROM tower_fence.resources WHERE resource = '{}' FOR UPDATE",
            self.name
        );
        DB::execute(&mut gate, &lock).await.unwrap();
        self.gate = Some(gate);
    }

    async fn newer_writes(&mut self) {
        let write = format!("UPDATE stock SET n = n + 1 WHERE sku = '{}'", self.name);
        let token_use = match self.walk.world.single_use[0] {
            true => TokenUse::SingleUse,
            false => TokenUse::Reusable,
        };
        let fence = self.db.fence();
        match self.gate.take() {
            // This session has locked the row.
            Some(mut gate) => {
                let admitted = fence.admit(&mut gate, &self.name, token(NEWER), token_use);
                admitted.await.unwrap();
                let write = format!("{write}; COMMIT");
                DB::execute(&mut gate, &write).await.unwrap();
            }
            None => {
                let begun = fence.begin(&self.name, token(NEWER), token_use);
                let mut tx = begun.await.unwrap();
                DB::execute(&mut tx, &write).await.unwrap();
                tx.commit().await.unwrap();
            }
        }
    }

    /// Terminates all sessions with an open transaction. On SQLite, cancels the requests of the
    /// process instead.
    async fn crash(&mut self, before: &State) {
        let under_way = Request::ALL.into_iter();
        let under_way = under_way.filter(|one| has_key(before.attempts[*one as usize]));
        if !DB::ABORTS_ON_ERROR {
            for request in under_way {
                self.calls.remove(&request).unwrap().cancel().await;
            }
            return;
        }
        end_sessions(self.db, IN_TRANSACTION).await;
        self.gate = None;
        for request in under_way {
            let call = self.call(request);
            // A request that waited for the row may have been admitted for a moment.
            let event = match before.attempts[request as usize] {
                Attempt::Claimed => call.next().await,
                _ => Event::Called,
            };
            let event = match event {
                Event::Called => Event::Answered(call.answer(StatusCode::CREATED, "").await),
                event => event,
            };
            match event {
                Event::Answered(answer) if answer.status.is_server_error() => {}
                other => panic!("{other:?}"),
            }
        }
    }

    async fn compare(&self) {
        let (name, state) = (&self.name, &self.walk.state);
        assert_eq!(stock(self.db, name).await, i64::from(state.count()));
        let max_token = max_token_of_row(self.db, name).await;
        let expected = fence_failover::real_token(state.max_token, HIGHEST_STALE);
        assert_eq!(max_token, Some(expected));
        // The number is ten times the number of valid records, plus the number of valid records
        // with this response.
        let stored = state.record.map_or(String::new(), |record| {
            text(record.body, record.answer.unwrap())
        });
        let body = match DB::ABORTS_ON_ERROR {
            true => "convert_from(body, 'UTF8')",
            false => "CAST(body AS TEXT)",
        };
        let records = format!(
            "SELECT 10 * count(*) + count(CASE WHEN status = 201 AND {body} = '{stored}' THEN 1 END) \
             FROM tower_fence.idempotency_keys WHERE key = '{name}' AND expires_at > {}",
            in_hours::<DB>(0)
        );
        let expected = if state.record.is_some() { 11 } else { 0 };
        assert_eq!(self.db.number(&records).await, expected);
    }

    fn call(&mut self, request: Request) -> &mut Call<DB> {
        self.calls.get_mut(&request).unwrap()
    }
}

fn text(body: Meaning, n: u8) -> String {
    format!("{body:?} {n}")
}

/// Returns an SQL expression for the time in this number of hours.
fn in_hours<DB: TestDatabase>(hours: i8) -> String {
    match DB::ABORTS_ON_ERROR {
        true => format!("now() + interval '{hours} hours'"),
        false => format!("(unixepoch() + 3600 * {hours}) * 1000"),
    }
}

/// Whether the transaction of an attempt is open.
const fn has_key(attempt: Attempt) -> bool {
    matches!(
        attempt,
        Attempt::Claimed | Attempt::Admitted | Attempt::Written(_)
    )
}
