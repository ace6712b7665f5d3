//! Traces of the world of floors, taken by the crate on Postgres and on SQLite, and by the functions in SQL.
//!
//! What a call does in several steps is drawn as a whole, where nothing is in its way.

use std::{collections::HashMap, time::Duration};

use rand::{SeedableRng, rngs::StdRng, seq::IndexedRandom};
use sqlx::{Connection, Postgres, Sqlite, pool::PoolConnection};
use tower_fence::{LiveTokens, TokenUse};
use tower_fence_model::{
    Model,
    fence::{
        floors::{Attempt, FORGED, Floors, Outcome, Removal, Resource, State, Step, Use, Who},
        writes,
    },
};

use super::{
    drawn::Drawn,
    fence_real::{Crate, Functions, Key, Real, Stale, Writes},
};
use crate::support::{
    database::{Fresh, TestDatabase},
    fence::token,
    functions,
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_crate_on_postgres_keeps_what_is_dead_as_the_model_does() {
    take_traces(&Crate::<Postgres>::new().await, 20, false, &[]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_crate_on_sqlite_keeps_what_is_dead_as_the_model_does() {
    take_traces(&Crate::<Sqlite>::new().await, 20, true, &[]).await;
}

/// There a raise and a removal may be part of a transaction that is open for longer, or rolled back.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_functions_keep_what_is_dead_as_the_model_does() {
    const NEVER: &str = "a lease is held through a removal, and writes";
    take_traces(&Functions::new().await, 60, false, &[NEVER]).await;
}

/// What is removed of a partition: no row of a token as high as `live`.
struct Idle {
    partition: u8,
    live: LiveTokens,
    lowest: Option<i64>,
}

trait Partition: Real {
    /// Whether a raise and a removal are transactions that stay open.
    const STAY_OPEN: bool;

    /// Raises in a transaction that stays open, or nothing is left to do.
    async fn open_raise(
        &self,
        name: &tower_fence::Resource,
        token: i64,
    ) -> Result<Option<Self::Open>, Stale>;

    /// Says how many rows are removed, in a transaction that stays open or is committed.
    async fn remove(&self, idle: Idle) -> (u64, Option<Self::Open>);
}

const HOUR: Duration = Duration::from_secs(60 * 60);

impl<DB: Writes> Partition for Crate<DB> {
    const STAY_OPEN: bool = false;

    async fn open_raise(
        &self,
        name: &tower_fence::Resource,
        token: i64,
    ) -> Result<Option<Self::Open>, Stale> {
        self.raise(name, token).await.map(|()| None)
    }

    async fn remove(&self, idle: Idle) -> (u64, Option<Self::Open>) {
        let live = idle.live.granted_up_to(token(i64::from(FORGED) - 1));
        let fence = self.database().fence();
        let removed = fence.remove_idle_below(HOUR, 10, &live).await;
        (removed.unwrap(), None)
    }
}

impl Partition for Functions {
    const STAY_OPEN: bool = true;

    async fn open_raise(
        &self,
        name: &tower_fence::Resource,
        token: i64,
    ) -> Result<Option<Self::Open>, Stale> {
        let mut conn = begin(self.database()).await;
        match functions::raise(&mut conn, name.as_str(), token).await {
            Ok(_) => Ok(Some(conn)),
            Err(refused) => {
                self.roll_back(conn).await;
                Err(Stale(refused.problem["max_token"].as_i64().unwrap()))
            }
        }
    }

    async fn remove(&self, idle: Idle) -> (u64, Option<Self::Open>) {
        let mut conn = begin(self.database()).await;
        let live = idle
            .lowest
            .map_or("NULL".to_owned(), |live| live.to_string());
        let remove = format!(
            "SELECT fence_remove_idle_of({}::smallint, '1 hour', 10, {}, {live})::bigint",
            idle.partition,
            FORGED - 1
        );
        let removed = Postgres::number(&mut conn, &remove).await.unwrap();
        (removed.unsigned_abs(), Some(conn))
    }
}

async fn begin(db: &Fresh<Postgres>) -> PoolConnection<Postgres> {
    let mut conn = db.pool.acquire().await.unwrap();
    conn.ping().await.unwrap();
    Postgres::execute(&mut conn, "BEGIN").await.unwrap();
    conn
}

async fn take_traces<R: Partition>(real: &R, traces: u8, one_writer: bool, never: &[&str]) {
    let world = Floors {
        holders: 3,
        removals: 3,
        requests: 3,
        one_writer,
        ..Floors::small()
    };
    let mut steps = 0;
    let mut removed = 0;
    let mut drawn = Drawn::default();
    for partition in 0..traces {
        let trace = Trace::begin(real, &world, partition).run(&mut drawn).await;
        steps += trace.taken.len();
        removed += trace.removed;
    }
    drawn.are_all_but(never);
    println!("{steps} steps, {removed} rows removed");
    assert!(removed > 5, "{removed}");
}

/// One trace, in a partition of its own.
struct Trace<'a, R: Real> {
    real: &'a R,
    world: &'a Floors,
    random: StdRng,
    state: State,
    taken: Vec<Step>,
    partition: u8,
    names: [tower_fence::Resource; 2],
    open: HashMap<Who, R::Open>,
    removal: Option<R::Open>,
    removed: u64,
}

impl<'a, R: Partition> Trace<'a, R> {
    fn begin(real: &'a R, world: &'a Floors, partition: u8) -> Self {
        let names = (0..).map(|n| format!("{partition}-{n}"));
        let mut names = names.filter(|name| crc32fast::hash(name.as_bytes()) as u8 == partition);
        let mut name = || tower_fence::Resource::new(names.next().unwrap()).unwrap();
        Self {
            real,
            world,
            random: StdRng::seed_from_u64(partition.into()),
            state: world.init_states().remove(0),
            taken: vec![],
            partition,
            names: [name(), name()],
            open: HashMap::new(),
            removal: None,
            removed: 0,
        }
    }

    async fn run(mut self, drawn: &mut Drawn) -> Self {
        while let Some(steps) = self.draw(drawn) {
            let before = self.state.clone();
            for step in &steps {
                self.state = self.world.next_state(&self.state, *step).unwrap();
                drawn.was_taken(step);
                drawn.was_reached(self.world, &self.state);
            }
            self.taken.extend(&steps);
            self.take(steps[0], &before).await;
            self.compare().await;
        }
        self
    }

    /// A step, with those that belong to the same call.
    fn draw(&mut self, drawn: &mut Drawn) -> Option<Vec<Step>> {
        let mut steps = vec![];
        self.world.actions(&self.state, &mut steps);
        drawn.was_possible(&steps);
        let calls = steps.into_iter().filter_map(|step| self.call(step));
        let calls: Vec<Vec<Step>> = calls.collect();
        calls.choose(&mut self.random).cloned()
    }

    fn call(&mut self, step: Step) -> Option<Vec<Step>> {
        let mut call = vec![];
        let mut state = self.state.clone();
        let mut go = |state: &mut State, step: Step| {
            let mut possible = vec![];
            self.world.actions(state, &mut possible);
            call.push(step);
            let is_possible = possible.contains(&step);
            *state = self.world.next_state(state, step)?;
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
                if matches!(attempt, Attempt::Has(Use::Raise, _)) && !R::STAY_OPEN {
                    go(&mut state, Step::Commit(who))?;
                }
            }
            Step::Ask => {
                go(&mut state, Step::LockFloor)?;
                let mut possible = vec![];
                self.world.actions(&state, &mut possible);
                possible.retain(|step| matches!(step, Step::Remove(_)));
                match possible.choose(&mut self.random) {
                    None => go(&mut state, Step::RollBackRemoval)?,
                    Some(remove) => {
                        go(&mut state, *remove)?;
                        if !R::STAY_OPEN {
                            go(&mut state, Step::CommitRemoval)?;
                        }
                    }
                }
            }
            // Only as a part of these.
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
                assert!(self.real.commit(open).await, "{}", self.told());
            }
            Step::RollBack(who) => {
                let open = self.open.remove(&who).unwrap();
                self.real.roll_back(open).await;
            }
            Step::Forge(resource) => {
                let name = &self.names[resource as usize];
                let admitted = self
                    .real
                    .admit(STRANGER, name, FORGED.into(), TokenUse::SingleUse);
                if let Ok(open) = admitted.await {
                    assert!(self.real.commit(open).await, "{}", self.told());
                }
            }
            Step::Ask => self.take_removal(before).await,
            Step::CommitRemoval => {
                let open = self.removal.take().unwrap();
                assert!(self.real.commit(open).await, "{}", self.told());
            }
            Step::RollBackRemoval => {
                let open = self.removal.take().unwrap();
                self.real.roll_back(open).await;
                self.age("0 days").await;
            }
            _ => {}
        }
    }

    async fn take_update(&mut self, who: Who, before: &State) {
        let holder = before.holders[who as usize];
        let after = self.state.holders[who as usize];
        let (name, token) = (&self.names[holder.resource as usize], who as i64 + 1);
        let begun = match holder.attempt {
            Attempt::Sent(Use::Write) => {
                let key: Key = (writes::Who::ALL[who as usize], writes::Request::First);
                let admitted = self.real.admit(key, name, token, TokenUse::SingleUse);
                admitted.await.map(Some)
            }
            _ => self.real.open_raise(name, token).await,
        };
        let expected = after.outcome != Some(Outcome::Refused);
        match begun {
            Ok(open) => {
                assert!(expected, "{}", self.told());
                self.open.extend(open.map(|open| (who, open)));
            }
            Err(stale) => assert!(!expected, "{stale:?}: {}", self.told()),
        }
    }

    async fn take_removal(&mut self, before: &State) {
        let remove = self.taken.iter().rev().find_map(|step| match step {
            Step::Remove(resource) => Some(Some(*resource)),
            Step::Ask => Some(None),
            _ => None,
        });
        let remove = remove.flatten();
        // That row is idle; where none may be removed, all that nobody has locked are.
        for resource in Resource::ALL {
            if remove.is_none_or(|remove| remove == resource) && !before.is_locked(resource) {
                self.age_row(resource, "1 day").await;
            }
        }
        let lowest = before.lowest_held().map(i64::from);
        let mut live = LiveTokens::default();
        if let Some(lowest) = lowest {
            live.add(&self.names[0], token(lowest));
        }
        let partition = self.partition;
        let (removed, open) = self
            .real
            .remove(Idle {
                partition,
                live,
                lowest,
            })
            .await;
        assert_eq!(removed, u64::from(remove.is_some()), "{}", self.told());
        self.removed += removed;
        match open {
            Some(open) if remove.is_none() => {
                self.real.roll_back(open).await;
            }
            open => self.removal = open,
        }
        if remove.is_none() {
            self.age("0 days").await;
        }
    }

    async fn compare(&self) {
        let db = self.real.database();
        for (name, expected) in self.names.iter().zip(self.state.rows) {
            let found = self.real.max_token(name).await;
            let floor = i64::from(self.state.floor);
            let by_floor = (floor > 0).then_some(floor);
            // The functions answer with the floor where there is no row.
            let found = found.filter(|found| expected.is_some() || Some(*found) != by_floor);
            assert_eq!(found, expected.map(i64::from), "{name}: {}", self.told());
        }
        let floor = format!(
            "SELECT floor FROM fence_floors WHERE partition = {}",
            self.partition
        );
        let floor = db.number(&floor).await;
        assert_eq!(floor, i64::from(self.state.floor), "{}", self.told());
    }

    async fn age(&self, by: &str) {
        for resource in Resource::ALL {
            if !self.state.is_locked(resource) {
                self.age_row(resource, by).await;
            }
        }
    }

    /// As if it was used so long ago.
    async fn age_row(&self, resource: Resource, by: &str) {
        let then = match R::DB::ABORTS_ON_ERROR {
            true => format!("CURRENT_TIMESTAMP - interval '{by}'"),
            false => format!("datetime('now', '-{by}')"),
        };
        let name = &self.names[resource as usize];
        let sql =
            format!("UPDATE fence_resources SET updated_at = {then} WHERE resource = '{name}'");
        self.real.database().execute(&sql).await;
    }

    fn told(&self) -> String {
        let removal: Removal = self.state.removal;
        format!(
            "partition {}: {:?}\n{removal:?}",
            self.partition, self.taken
        )
    }
}

const STRANGER: Key = (writes::Who::Stranger, writes::Request::First);
