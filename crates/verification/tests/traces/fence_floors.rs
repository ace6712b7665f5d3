//! Traces of the model of floors, which the crate executes on Postgres and on SQLite, and the SQL
//! functions on Postgres.
//!
//! All steps of a call are drawn together, and only if the locks that they need are free.

use std::collections::HashMap;

use rand::{
    RngExt,
    seq::{IndexedRandom, IteratorRandom},
};
use sqlx::{Postgres, Sqlite};
use tower_fence::{TokenUse, epochs::partition_of};
use tower_fence_model::{
    Model,
    fence::{
        floors::{Attempt, FORGED, Floors, MOVE, Outcome, Resource, State, Step, Use, Who},
        writes,
    },
};

use super::{
    fence::has_sessions,
    fence_failover::{self, HIGHEST_STALE, Standby},
    fence_real::{Crate, Functions, Key, Real, Stale, max_token_of_row},
    sessions::{IN_TRANSACTION, end_sessions},
    walk::{Drawn, Walk, possible},
};
use crate::support::database::TestDatabase;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn crate_on_postgres_matches_the_model_of_floors() {
    take_traces(&Crate::<Postgres>::new().await, &with_strangers(), 20, &[]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn crate_on_sqlite_matches_the_model_of_floors() {
    let world = Floors {
        one_writer: true,
        ..with_strangers()
    };
    take_traces(&Crate::<Sqlite>::new().await, &world, 20, &[]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn functions_match_the_model_of_floors() {
    by_functions(&Functions::new().await).await;
}

/// Runs the traces against the SQL functions. With these, a raise and a removal may be part of a
/// transaction that stays open or is rolled back.
pub(super) async fn by_functions(functions: &Functions) {
    take_traces(functions, &with_strangers(), 60, &[HELD_THROUGH]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn crate_matches_the_model_of_floors_at_a_failover() {
    take_traces(&Crate::<Postgres>::new().await, &failing_over(), 60, &[]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn functions_match_the_model_of_floors_at_a_failover() {
    let functions = Functions::new().await;
    take_traces(&functions, &failing_over(), 60, &[HELD_THROUGH]).await;
}

/// The outcome that the walks of the SQL functions do not reach.
const HELD_THROUGH: &str = "a holder whose lease was held during a removal writes";

fn with_strangers() -> Floors {
    Floors {
        holders: 3,
        removals: 3,
        requests: 3,
        ..Floors::small()
    }
}

fn failing_over() -> Floors {
    Floors {
        failovers: u8::from(has_sessions::<Postgres>()),
        ..Floors {
            strangers: 0,
            ..with_strangers()
        }
    }
}

async fn take_traces<R: Real>(real: &R, world: &Floors, traces: u8, never: &[&str]) {
    let mut steps = 0;
    let mut removed = 0;
    let mut drawn = Drawn::default();
    for partition in 0..traces {
        if has_sessions::<R::DB>() {
            fence_failover::forget(real.database()).await;
        }
        let walk = Walk::begin(world, partition.into(), &mut drawn);
        let trace = Trace::begin(real, partition, walk).run().await;
        steps += trace.walk.taken.len();
        removed += trace.removed;
    }
    drawn.are_all_but(never);
    println!("{steps} steps, {removed} rows removed");
    assert!(removed > 5, "{removed}");
}

/// One trace, in a partition of its own.
struct Trace<'a, R: Real> {
    real: &'a R,
    walk: Walk<'a, Floors>,
    partition: u8,
    names: [tower_fence::Resource; 2],
    open: HashMap<Who, R::Open>,
    removal: Option<R::Open>,
    removed: u64,
    /// The state that a failover would leave.
    standby: Option<Standby>,
}

impl<'a, R: Real> Trace<'a, R> {
    fn begin(real: &'a R, partition: u8, walk: Walk<'a, Floors>) -> Self {
        let names = (0..).map(|n| format!("{partition}-{n}"));
        let names = names.map(|name| tower_fence::Resource::new(name).unwrap());
        let mut names = names.filter(|name| partition_of(name) == partition);
        let names = [(); 2].map(|()| names.next().unwrap());
        Self {
            real,
            walk,
            partition,
            names,
            open: HashMap::new(),
            removal: None,
            removed: 0,
            standby: None,
        }
    }

    async fn run(mut self) -> Self {
        while let Some(steps) = self.draw() {
            let before = self.walk.state.clone();
            for step in &steps {
                self.walk.go(*step);
            }
            self.take(steps[0], &before).await;
            self.compare().await;
        }
        self
    }

    /// Draws a step, together with the other steps of the same call.
    fn draw(&mut self) -> Option<Vec<Step>> {
        let steps = self.walk.possible();
        let calls = steps.into_iter().filter_map(|step| self.call(step));
        let calls: Vec<Vec<Step>> = calls.collect();
        calls.choose(&mut self.walk.random).cloned()
    }

    fn call(&mut self, step: Step) -> Option<Vec<Step>> {
        let (mut call, mut state) = (vec![], self.walk.state.clone());
        let world = self.walk.world;
        let mut go = |state: &mut State, step: Step| {
            call.push(step);
            let is_possible = possible(world, state).contains(&step);
            *state = world.next_state(state, step)?;
            is_possible.then_some(())
        };
        go(&mut state, step)?;
        match step {
            Step::Update(who) => {
                if let Attempt::NoRow(_) = state.holders[who as usize].attempt {
                    go(&mut state, Step::ReadFloor(who))?;
                    go(&mut state, Step::Insert(who))?;
                }
                let attempt = state.holders[who as usize].attempt;
                if matches!(attempt, Attempt::Has(Use::Raise, _)) && R::IS_CRATE {
                    go(&mut state, Step::Commit(who))?;
                }
            }
            Step::Ask => {
                go(&mut state, Step::LockFloor)?;
                let steps = possible(world, &state).into_iter();
                let removals = steps.filter(|step| matches!(step, Step::Remove(_)));
                match removals.choose(&mut self.walk.random) {
                    None => go(&mut state, Step::RollBackRemoval)?,
                    Some(remove) => {
                        go(&mut state, remove)?;
                        if R::IS_CRATE {
                            go(&mut state, Step::CommitRemoval)?;
                        }
                    }
                }
            }
            // These steps occur only as parts of the calls above.
            Step::ReadFloor(_) | Step::Insert(_) | Step::LockFloor | Step::Remove(_) => {
                return None;
            }
            _ => {}
        }
        Some(call)
    }

    async fn take(&mut self, step: Step, before: &State) {
        match step {
            Step::Update(who) => self.take_update(who, before).await,
            Step::Commit(who) => {
                let open = self.open.remove(&who).unwrap();
                assert!(self.real.commit(open).await);
            }
            Step::RollBack(who) => {
                let open = self.open.remove(&who).unwrap();
                self.real.roll_back(open).await;
            }
            Step::Forge(resource) => {
                let name = &self.names[resource as usize];
                if let Ok(open) = self.admit_stranger(name, real_token(FORGED)).await {
                    assert!(self.real.commit(open).await);
                }
            }
            Step::Ask => self.take_removal(before).await,
            Step::CommitRemoval => {
                let open = self.removal.take().unwrap();
                assert!(self.real.commit(open).await);
            }
            Step::RollBackRemoval => {
                let open = self.removal.take().unwrap();
                self.real.roll_back(open).await;
                self.age("0 days").await;
            }
            Step::FallBehind => {
                self.standby = Some(Standby::of(self.real.database(), &self.names).await);
            }
            Step::FailOver => {
                self.end_all().await;
                let standby = self.standby.take().unwrap();
                standby.promote(self.real.database()).await;
                self.age("0 days").await;
            }
            Step::CatchUp => self.catch_up().await,
            _ => {}
        }
    }

    async fn admit_stranger(
        &self,
        name: &tower_fence::Resource,
        token: i64,
    ) -> Result<R::Open, Stale> {
        let key = (writes::Who::Stranger, writes::Request::First);
        let admitted = self.real.admit(key, name, token, TokenUse::SingleUse);
        admitted.await
    }

    /// Terminates all sessions with an open transaction. Their COMMITs must then fail.
    async fn end_all(&mut self) {
        let open: Vec<_> = self.open.drain().map(|(_, open)| open).collect();
        let open: Vec<_> = open.into_iter().chain(self.removal.take()).collect();
        if !open.is_empty() {
            end_sessions(self.real.database(), IN_TRANSACTION).await;
        }
        for open in open {
            assert!(!self.real.commit(open).await);
        }
    }

    /// Moves a partition to the new timeline, with a request whose token was valid before the
    /// failover or with a new epoch. Rows that are not used keep the old timeline.
    async fn catch_up(&mut self) {
        let name = &self.names[self.walk.random.random_range(0..2)];
        let db = self.real.database();
        if !self.walk.random.random::<bool>() {
            return fence_failover::hand_out(db, name).await;
        }
        assert!(
            self.admit_stranger(name, i64::from(MOVE - 1))
                .await
                .is_err()
        );
        // If a function returns an error, its move to the new timeline is rolled back.
        if !R::IS_CRATE {
            fence_failover::catch_up(db, name).await;
        }
    }

    /// Whether a row has the timeline before the failover.
    async fn is_behind(&self, name: &tower_fence::Resource) -> bool {
        let behind = format!(
            "tower_fence.resources WHERE resource = '{name}' AND history <> tower_fence.current_history()"
        );
        self.walk.state.failed_over
            && !self.walk.state.changed
            && self.real.database().count(&behind).await == 1
    }

    async fn take_update(&mut self, who: Who, before: &State) {
        let holder = before.holders[who as usize];
        let name = &self.names[holder.resource as usize];
        let token = real_token(holder.token);
        let begun = match holder.attempt {
            Attempt::Sent(Use::Write) => {
                let key: Key = (writes::Who::ALL[who as usize], writes::Request::First);
                let admitted = self.real.admit(key, name, token, TokenUse::SingleUse);
                admitted.await.map(Some)
            }
            _ => {
                // A raise does not move the row to the new timeline. The model of the fence shows
                // that this is not necessary.
                if self.is_behind(name).await {
                    fence_failover::catch_up(self.real.database(), name).await;
                }
                self.real.open_raise(name, token).await
            }
        };
        let outcome = self.walk.state.holders[who as usize].outcome;
        assert_eq!(begun.is_ok(), outcome != Some(Outcome::Refused));
        let open = begun.ok().flatten();
        self.open.extend(open.map(|open| (who, open)));
    }

    async fn take_removal(&mut self, before: &State) {
        let remove = self.walk.taken.iter().rev().find_map(|step| match step {
            Step::Remove(resource) => Some(Some(*resource)),
            Step::Ask => Some(None),
            _ => None,
        });
        let remove = remove.flatten();
        // Makes the row that the removal removes idle. If there is no such row, makes all unlocked
        // rows idle.
        for resource in Resource::ALL {
            if remove.is_none_or(|remove| remove == resource) && !before.is_locked(resource) {
                self.age_row(resource, "1 day").await;
            }
        }
        let lowest = before.lowest_held().map(real_token);
        let name = &self.names[0];
        let (removed, open) = self.real.remove(name, lowest, real_token(FORGED - 1)).await;
        assert_eq!(removed, u64::from(remove.is_some()));
        self.removed += removed;
        if remove.is_some() {
            self.removal = open;
            return;
        }
        if let Some(open) = open {
            self.real.roll_back(open).await;
        }
        self.age("0 days").await;
    }

    async fn compare(&self) {
        let db = self.real.database();
        let floor = real_token(self.walk.state.floor);
        for (name, expected) in self.names.iter().zip(self.walk.state.rows) {
            let found = self.real.max_token(name).await;
            let by_floor = (floor > 0).then_some(floor);
            // The functions return the floor if there is no row.
            let found =
                found.filter(|found| R::IS_CRATE || expected.is_some() || Some(*found) != by_floor);
            let rows = max_token_of_row(db, name).await;
            assert_eq!(rows.is_some(), expected.is_some(), "{name}");
            // A row with the old timeline is moved to the new one when it is used.
            let found = match self.is_behind(name).await {
                true => found.map(|found| found.max(HIGHEST_STALE)),
                false => found,
            };
            assert_eq!(found, expected.map(real_token), "{name}");
        }
        let partition = self.partition;
        let found = format!("SELECT floor FROM tower_fence.floors WHERE partition = {partition}");
        assert_eq!(db.number(&found).await, floor);
    }

    async fn age(&self, by: &str) {
        for resource in Resource::ALL {
            if !self.walk.state.is_locked(resource) {
                self.age_row(resource, by).await;
            }
        }
    }

    /// Moves the time of a row's last use into the past.
    async fn age_row(&self, resource: Resource, by: &str) {
        let then = match R::DB::ABORTS_ON_ERROR {
            true => format!("CURRENT_TIMESTAMP - interval '{by}'"),
            false => format!("datetime('now', '-{by}')"),
        };
        let name = &self.names[resource as usize];
        let sql = format!(
            "UPDATE tower_fence.resources SET updated_at = {then} WHERE resource = '{name}'"
        );
        self.real.database().execute(&sql).await;
    }
}

fn real_token(token: u8) -> i64 {
    fence_failover::real_token(token, MOVE)
}
