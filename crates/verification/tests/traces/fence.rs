//! Traces of the model of the fence, which the crate executes on Postgres and on SQLite, and the
//! SQL functions on Postgres.
//!
//! A step that needs a lock is executed only when the lock is free in the model. There is one
//! exception: at any time, one single statement may wait for its row.

use std::collections::HashMap;

use axum::{
    Router,
    body::Body,
    http::{Request as HttpRequest, StatusCode},
    routing::get,
};
use rand::RngExt;
use sqlx::{Postgres, Sqlite};
use tokio::task::JoinHandle;
use tower_fence::{FenceLayer, PathParam, Resource, TokenUse};
use tower_fence_model::{
    fence::writes::{Attempt, Data, Faults, MOVE, Mode, Request, Stage, Step, Who, Writes},
    search::Rules,
};

use super::{
    call::{Call, Event, follow},
    fence_failover::{self, Standby},
    fence_real::{Crate, Functions, Key, Real, SingleOutcome, SingleWrite, Stale, stock},
    sessions::{IN_TRANSACTION, SESSION, WAITING, end_sessions, sessions_wait},
    walk::{Drawn, Walk},
};
use crate::support::database::TestDatabase;

/// The number of traces in each mode. The SQL functions have fewer modes.
const TRACES: u64 = 10;
const OF_FUNCTIONS: u64 = 15;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn crate_on_postgres_matches_the_model_of_the_fence() {
    let real = Crate::<Postgres>::new().await;
    take_traces(&real, TRACES, Mode::all(), false, &[]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn crate_on_sqlite_matches_the_model_of_the_fence() {
    let real = Crate::<Sqlite>::new().await;
    take_traces(&real, TRACES, Mode::all(), true, &["SwallowError"]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn functions_match_the_model_of_the_fence() {
    by_functions(&Functions::new().await).await;
}

/// Runs the traces against the SQL functions. With these, a fenced read is an admission in a
/// transaction that writes nothing, and there are no single-statement writes.
pub(super) async fn by_functions(functions: &Functions) {
    let modes = Mode::all().filter(|mode| !mode.at_once);
    // Most older holders are superseded before they write.
    let never = ["each holder has written"];
    take_traces(functions, OF_FUNCTIONS, modes, false, &never).await;
}

async fn take_traces<R: Real>(
    real: &R,
    traces: u64,
    modes: impl Iterator<Item = Mode>,
    one_writer: bool,
    never: &[&str],
) {
    let (mut steps, mut overtaken) = (0, 0);
    let mut has_single = false;
    let mut drawn = Drawn::default();
    for mode in modes {
        has_single |= mode.at_once;
        let world = Writes {
            holders: 3,
            faults: Faults {
                repetitions: 1,
                failures: 1,
                crashes: 1,
                failovers: u8::from(has_sessions::<R::DB>()),
                strangers: 1,
            },
            modes: vec![mode],
            one_writer,
            rules: Rules::default(),
        };
        // A statement reads from its snapshot, which may be outdated when the statement has locked
        // the row. This mode gets more traces.
        let reads_by_itself = mode.at_once && !mode.announced && !mode.writes_back;
        let traces = if reads_by_itself { 4 * traces } else { traces };
        for seed in 0..traces {
            let walk = Walk::begin(&world, seed, &mut drawn);
            let trace = Trace::begin(real, mode, walk).await.run().await;
            steps += trace.walk.taken.len();
            overtaken += trace.overtaken;
        }
    }
    drawn.are_all_but(never);
    println!("{steps} steps, {overtaken} single statements that were overtaken");
    // SQLite has only one writer, so its statements are never overtaken.
    assert!(!has_single || one_writer || overtaken > 5, "{overtaken}");
}

/// A fenced read whose transaction is open.
enum FencedRead<R: Real> {
    /// A request to the layer, and whether it reads in its transaction. The lock of the row also
    /// protects reads on another connection.
    Request(Box<Call<R::DB>>, bool),
    Transaction(R::Open),
}

/// One trace, on a resource of its own.
pub(super) struct Trace<'a, R: Real> {
    real: &'a R,
    pub(super) walk: Walk<'a, Writes>,
    resource: Resource,
    open: HashMap<Key, R::Open>,
    /// The fenced reads that were admitted and not yet answered.
    reads: HashMap<Who, FencedRead<R>>,
    /// The state that a failover would leave.
    standby: Option<Standby>,
    /// The single statement that is running, and may be waiting.
    pub(super) single: Option<(Key, JoinHandle<SingleOutcome>)>,
    /// The number of single statements that waited for their row while an older token wrote it.
    overtaken: usize,
}

impl<'a, R: Real> Trace<'a, R> {
    async fn begin(real: &'a R, mode: Mode, walk: Walk<'a, Writes>) -> Self {
        let name = format!(
            "{}-{}-{}-{}-{}",
            mode.announced, mode.single_use, mode.at_once, mode.writes_back, walk.seed
        );
        let resource = Resource::new(&name).unwrap();
        if has_sessions::<R::DB>() {
            fence_failover::forget(real.database()).await;
        }
        // The model begins with a row.
        real.raise(&resource, 1).await.unwrap();
        let insert = format!("INSERT INTO stock VALUES ('{name}', 0)");
        real.database().execute(&insert).await;
        Self {
            real,
            walk,
            resource,
            open: HashMap::new(),
            reads: HashMap::new(),
            standby: None,
            single: None,
            overtaken: 0,
        }
    }

    /// Takes steps until none is possible.
    async fn run(mut self) -> Self {
        while let Some(step) = self.draw() {
            self.walk.go(step);
            self.take(step).await;
            // If a single statement can proceed, the database is ahead of the model, so the two are
            // compared later.
            if self.next_of_single().is_none() {
                self.end_single().await;
                self.compare().await;
            }
        }
        self
    }

    /// Compares the outcome of the single statement with the model, if the model has an outcome.
    async fn end_single(&mut self) {
        let state = &self.walk.state;
        let is_over = |((who, request), _): &mut (Key, _)| {
            matches!(
                state.attempt(*who, *request),
                Attempt::Committed | Attempt::Over
            )
        };
        let Some(((who, _), written)) = self.single.take_if(is_over) else {
            return;
        };
        match (self.walk.taken.last(), written.await.unwrap()) {
            (Some(Step::Admit(..)), Some(Err(stale))) => self.is_refusal(self.token_of(who), stale),
            (Some(Step::Admit(..)), written) => panic!("{written:?}"),
            (last, written) => {
                assert_eq!(written, Some(Ok(true)));
                // The second attempt has written, in a transaction.
                self.overtaken += usize::from(matches!(last, Some(Step::Commit(..))));
            }
        }
    }

    /// Checks the `max_token` of a refusal. The crate may refuse a token because of a cached value.
    /// This value may be lower than the current one, but not lower than the token.
    fn is_refusal(&self, token: i64, stale: Stale) {
        let known = token..=self.max_token();
        assert!(known.contains(&stale.0), "{stale:?} for {token}");
    }

    async fn compare(&self) {
        let max_token = self.real.max_token(&self.resource).await;
        assert_eq!(max_token, Some(self.max_token()));
        let n = stock(self.real.database(), &self.resource).await;
        assert_eq!(n, number(self.walk.state.committed.data));
    }

    async fn take(&mut self, step: Step) {
        match step {
            // After a failover, the old epochs are stale.
            Step::Grant(_) if self.walk.state.timeline > 0 => {
                fence_failover::hand_out(self.real.database(), &self.resource).await;
            }
            Step::AnswerGrant(who) => {
                let announced = self.real.announce(&self.resource, self.token_of(who), who);
                let expected = self.walk.state.holder(who).stage != Stage::Superseded;
                assert_eq!(announced.await, expected);
            }
            Step::AdmitRead(who) => self.admit_read(who).await,
            Step::Read(who) => self.take_read(who).await,
            Step::CommitRead(who) => match self.reads.remove(&who).unwrap() {
                FencedRead::Request(mut call, _) => {
                    let answer = call.answer(StatusCode::OK, "").await;
                    assert_eq!(answer.status, StatusCode::OK);
                }
                FencedRead::Transaction(open) => assert!(self.real.commit(open).await),
            },
            Step::EndRead(who) => {
                let read = self.reads.remove(&who).unwrap();
                self.end_read(read).await;
            }
            Step::BeginStatement(who, request) => {
                let what = SingleWrite {
                    resource: self.resource.clone(),
                    token: self.token_of(who),
                    token_use: self.token_use(),
                    sql: self.single_statement(who, request),
                };
                let written = self.real.write((who, request), what);
                self.single = Some(((who, request), written));
                if self.walk.state.is_open() {
                    sessions_wait(self.real.database(), 1).await;
                }
            }
            Step::Admit(who, request) if !self.is_single(who, request) => {
                let (key, token) = ((who, request), self.token_of(who));
                let admitted = self
                    .real
                    .admit(key, &self.resource, token, self.token_use());
                let admitted = admitted.await;
                let expected = self.walk.state.attempt(who, request) == Attempt::Admitted;
                assert_eq!(admitted.is_ok(), expected);
                match admitted {
                    Ok(open) => drop(self.open.insert(key, open)),
                    Err(stale) => self.is_refusal(token, stale),
                }
            }
            Step::Write(who, request) if !self.is_single(who, request) => {
                let sql = self.statement(who, request);
                let open = self.open.get_mut(&(who, request)).unwrap();
                R::DB::run(open, &sql).await;
            }
            Step::Commit(who, request) if !self.is_single(who, request) => {
                assert!(self.commit(who, request).await);
            }
            Step::SwallowError(who, request) => {
                let open = self.open.get_mut(&(who, request)).unwrap();
                let failing = "INSERT INTO nowhere VALUES (1)";
                assert!(R::DB::execute(open, failing).await.is_err());
            }
            Step::CommitAborted(who, request) => assert!(!self.commit(who, request).await),
            Step::CommitFails(who, request) if has_sessions::<R::DB>() => {
                let open = self.open.get_mut(&(who, request)).unwrap();
                let session = R::DB::number(open, SESSION).await.unwrap();
                end_sessions(self.real.database(), &format!("pid = {session}")).await;
                assert!(!self.commit(who, request).await);
            }
            Step::Crash if has_sessions::<R::DB>() => self.end_all().await,
            Step::FallBehind => {
                let names = std::slice::from_ref(&self.resource);
                self.standby = Some(Standby::of(self.real.database(), names).await);
            }
            Step::FailOver => {
                if !(self.open.is_empty() && self.reads.is_empty()) {
                    self.end_all().await;
                }
                let standby = self.standby.take().unwrap();
                standby.promote(self.real.database()).await;
            }
            // A single statement itself moves the tokens up, unless its token was stale before the
            // failover.
            Step::CatchUp if self.single_is_alive() => {}
            Step::CatchUp => self.catch_up().await,
            // SQLite has no server: only the process crashes.
            Step::Crash => {
                for open in std::mem::take(&mut self.open).into_values() {
                    self.real.roll_back(open).await;
                }
                for read in std::mem::take(&mut self.reads).into_values() {
                    self.end_read(read).await;
                }
            }
            Step::Fail(who, request)
            | Step::GoAway(who, request)
            | Step::CommitFails(who, request)
            | Step::TurnAway(who, request) => {
                let open = self.open.remove(&(who, request)).unwrap();
                self.real.roll_back(open).await;
            }
            Step::AnswerFailure(who, _) => {
                let token = self.token_of(who);
                let raised = self.real.raise(&self.resource, token).await;
                assert_eq!(raised.is_ok(), token > self.max_token());
            }
            // The other steps do not reach the database.
            _ => {}
        }
    }

    /// Commits a request. Returns whether the COMMIT was confirmed.
    async fn commit(&mut self, who: Who, request: Request) -> bool {
        let open = self.open.remove(&(who, request)).unwrap();
        self.real.commit(open).await
    }

    fn single_is_alive(&self) -> bool {
        let single = self.single.as_ref().map(|single| single.0);
        single.is_some_and(|(who, _)| self.token_of(who) > self.max_token())
    }

    /// Terminates all sessions with an open transaction. Their COMMITs must then fail.
    async fn end_all(&mut self) {
        let db = self.real.database();
        if let Some((_, waiting)) = self.single.take() {
            // The waiting session is terminated first. Otherwise it could lock the row.
            end_sessions(db, WAITING).await;
            assert_eq!(waiting.await.unwrap(), None);
        }
        end_sessions(db, IN_TRANSACTION).await;
        for open in std::mem::take(&mut self.open).into_values() {
            assert!(!self.real.commit(open).await);
        }
        for read in std::mem::take(&mut self.reads).into_values() {
            match read {
                FencedRead::Request(call, _) => call.cancel().await,
                FencedRead::Transaction(open) => assert!(!self.real.commit(open).await),
            }
        }
    }

    /// Moves the row to the new timeline with a request whose token was valid before the failover.
    async fn catch_up(&mut self) {
        let (name, stale_token) = (&self.resource, i64::from(MOVE - 1));
        if R::IS_CRATE && !self.walk.random.random::<bool>() {
            let announced = self.real.announce(name, stale_token, Who::Stranger);
            return assert!(!announced.await);
        }
        let key = (Who::Stranger, Request::Again);
        let admitted = self.real.admit(key, name, stale_token, self.token_use());
        self.is_refusal(
            stale_token,
            admitted.await.err().expect("the token is stale"),
        );
        if !R::IS_CRATE {
            fence_failover::catch_up(self.real.database(), name).await;
        }
    }

    async fn admit_read(&mut self, who: Who) {
        let token = self.token_of(who);
        let expected = self.walk.state.holder(who).stage == Stage::Admitted;
        if R::IS_CRATE {
            let in_transaction = self.walk.random.random();
            let layer = FenceLayer::new(self.real.database().fence(), PathParam("sku"));
            let app = Router::new()
                .route("/{sku}", get(follow::<R::DB>))
                .route_layer(layer);
            let request = HttpRequest::get(format!("/{}", self.resource))
                .header("Fencing-Token", token)
                .body(Body::empty());
            let mut call = Call::send(app, request.unwrap());
            match call.next().await {
                Event::Called if expected => {
                    let read = FencedRead::Request(Box::new(call), in_transaction);
                    self.reads.insert(who, read);
                }
                Event::Answered(answer) if !expected => {
                    assert_eq!(answer.status, StatusCode::PRECONDITION_FAILED);
                }
                other => panic!("{other:?}"),
            }
            return;
        }
        let (key, token_use) = ((who, Request::First), TokenUse::Reusable);
        let admitted = self.real.admit(key, &self.resource, token, token_use);
        let admitted = admitted.await;
        assert_eq!(admitted.is_ok(), expected);
        match admitted {
            Ok(open) => drop(self.reads.insert(who, FencedRead::Transaction(open))),
            Err(stale) => self.is_refusal(token, stale),
        }
    }

    async fn take_read(&mut self, who: Who) {
        let sql = format!("SELECT n FROM stock WHERE sku = '{}'", self.resource);
        let n = match self.reads.get_mut(&who) {
            None | Some(FencedRead::Request(_, false)) => self.real.database().number(&sql).await,
            Some(FencedRead::Transaction(open)) => R::DB::number(open, &sql).await.unwrap(),
            Some(FencedRead::Request(call, true)) => call.run(&sql).await.unwrap(),
        };
        assert_eq!(n, number(self.walk.state.holder(who).read));
    }

    /// Disconnects the client of the read, or rolls its transaction back.
    async fn end_read(&self, read: FencedRead<R>) {
        match read {
            FencedRead::Request(call, _) => call.cancel().await,
            FencedRead::Transaction(open) => self.real.roll_back(open).await,
        }
    }

    /// Returns the statement of a holder's transaction.
    fn statement(&self, who: Who, request: Request) -> String {
        let state = &self.walk.state;
        let change = number(state.change(who, request, [0; 6]));
        let n = match state.mode.writes_back {
            true => number(state.holder(who).read).to_string(),
            false => "n".to_owned(),
        };
        format!(
            "UPDATE stock SET n = {n} + {change} WHERE sku = '{}'",
            self.resource
        )
    }

    /// Returns the UPDATE of `statement` as a single statement, which reads the stock from the
    /// snapshot of that statement.
    fn single_statement(&self, who: Who, request: Request) -> String {
        let snapshot = format!(
            "(SELECT o.n FROM stock AS o WHERE o.sku = '{}')",
            self.resource
        );
        let statement = self
            .statement(who, request)
            .replace("= n +", &format!("= {snapshot} +"));
        format!("{statement} AND EXISTS (SELECT 1 FROM fence) RETURNING n")
    }

    fn is_single(&self, who: Who, request: Request) -> bool {
        self.single
            .as_ref()
            .is_some_and(|single| single.0 == (who, request))
    }

    pub(super) fn max_token(&self) -> i64 {
        real_token(self.walk.state.committed.row.max_token)
    }

    pub(super) fn token_of(&self, who: Who) -> i64 {
        real_token(self.walk.state.holder(who).token)
    }

    fn token_use(&self) -> TokenUse {
        match self.walk.state.mode.single_use {
            true => TokenUse::SingleUse,
            false => TokenUse::Reusable,
        }
    }
}

/// Whether the database has sessions that can be ended.
pub(super) const fn has_sessions<DB: TestDatabase>() -> bool {
    DB::ABORTS_ON_ERROR
}

fn real_token(token: u8) -> i64 {
    fence_failover::real_token(token, MOVE)
}

/// Returns the data as one number.
fn number(data: Data) -> i64 {
    data.iter()
        .rev()
        .fold(0, |n, times| n * 16 + i64::from(*times))
}
