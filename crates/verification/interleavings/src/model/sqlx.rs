//! A model of `sqlx`: a pool like that of sqlx, with connections that are only numbers.
//!
//! The queue of the pool is fair, and `try_acquire` bypasses the queue. If an acquisition is
//! dropped, the connection that it was opening is closed. If a connection is dropped, a task
//! returns it to the pool.

use std::{
    future::poll_fn,
    io,
    marker::PhantomData,
    ops::{Deref, DerefMut},
    pin::pin,
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use shuttle::{
    future::yield_now,
    rand::{Rng, thread_rng},
};

use super::{
    clock::{Instant, sleep},
    runtime::spawn,
    step,
    sync::{OwnedSemaphorePermit, Semaphore},
    tokio::time::timeout,
};

pub mod pool {
    pub use super::PoolConnection;
}

pub mod postgres {
    pub use super::super::postgres::sessions::{PgConnectOptions, PgListener, PgPoolOptions};
}

/// A trait without methods. The types that execute statements have inherent methods instead.
pub trait Executor {}

pub struct AssertSqlSafe<T>(pub T);

pub use ::sqlx::{Error, Result};

/// A counterpart of the crate's trait with this name, reduced to connections.
pub trait Transactions: Database {
    const HAS_SERVER: bool;
    fn address(options: &<Self::Connection as Connection>::Options) -> String;
}

/// A counterpart of the crate's type with this name. The database is not distributed.
pub struct Names;

impl Names {
    pub const fn is_distributed(&self) -> bool {
        false
    }
}

pub trait Database: Sized + Send + Sync + 'static {
    type Connection: Connection;
    type TransactionManager: TransactionManager<Database = Self>;
}

pub trait TransactionManager {
    type Database: Database;
    fn start_rollback(conn: &mut <Self::Database as Database>::Connection);
}

pub trait Connection: From<u32> + Send + Sync + 'static {
    type Options: From<Options>;
    fn ping(&mut self) -> impl Future<Output = Result<()>> + Send;
}

/// The database of the scenarios.
pub struct Model;

impl Database for Model {
    type Connection = ModelConnection;
    type TransactionManager = Self;
}

impl TransactionManager for Model {
    type Database = Self;

    fn start_rollback(_: &mut ModelConnection) {}
}

impl Transactions for Model {
    const HAS_SERVER: bool = true;

    fn address(_: &Options) -> String {
        "model".into()
    }
}

pub struct ModelConnection;

impl From<u32> for ModelConnection {
    fn from(_: u32) -> Self {
        Self
    }
}

impl Connection for ModelConnection {
    type Options = Options;

    async fn ping(&mut self) -> Result<()> {
        sleep(Duration::from_micros(100)).await;
        Ok(())
    }
}

/// The settings of the pool.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    pub connections: u32,
    pub acquire_timeout: Duration,
    /// The number of failures among ten attempts to open a connection.
    pub failures: u32,
}

impl Options {
    pub fn get_max_connections(&self) -> u32 {
        self.connections
    }

    pub fn get_acquire_timeout(&self) -> Duration {
        self.acquire_timeout
    }

    pub fn get_test_before_acquire(&self) -> bool {
        true
    }
}

pub struct Pool<DB: Database>(Arc<Inner>, PhantomData<fn() -> DB>);

struct Inner {
    options: Options,
    permits: Arc<Semaphore>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    idle: Vec<u32>,
    size: u32,
    opened: u32,
    /// The number of connections that were closed in the first second.
    closed: u32,
}

impl<DB: Database> Clone for Pool<DB> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0), PhantomData)
    }
}

impl<DB: Database> Pool<DB> {
    pub fn new(options: Options) -> Self {
        let inner = Inner {
            options,
            permits: Arc::new(Semaphore::new(options.connections as usize)),
            state: Mutex::default(),
        };
        Self(Arc::new(inner), PhantomData)
    }

    pub fn options(&self) -> &Options {
        &self.0.options
    }

    pub fn connect_options(&self) -> Arc<<DB::Connection as Connection>::Options> {
        Arc::new(self.0.options.into())
    }

    pub fn is_closed(&self) -> bool {
        false
    }

    pub fn size(&self) -> u32 {
        step();
        self.0.state().size
    }

    pub fn num_idle(&self) -> usize {
        step();
        self.0.state().idle.len()
    }

    /// Returns the number of connections that were closed in the first second because their
    /// acquisition was dropped.
    pub fn closed(&self) -> u32 {
        self.0.state().closed
    }

    /// Waits until all connections are in the pool. If one never returns, the search fails.
    pub async fn is_whole(&self) {
        let is_whole = || {
            let permits = self.0.permits.available_permits();
            let state = self.0.state();
            permits == self.0.options.connections as usize && state.idle.len() as u32 == state.size
        };
        while !is_whole() {
            sleep(Duration::from_millis(5)).await;
            yield_now().await;
        }
    }

    pub fn try_acquire(&self) -> Option<PoolConnection<DB>> {
        let permit = Arc::clone(&self.0.permits).try_acquire_owned().ok()?;
        step();
        let number = self.0.state().idle.pop()?;
        Some(PoolConnection::new(&self.0, permit, number))
    }

    pub fn acquire(&self) -> impl Future<Output = Result<PoolConnection<DB>>> + Send + 'static {
        let inner = Arc::clone(&self.0);
        async move {
            let acquired = timeout(inner.options.acquire_timeout, inner.acquire()).await;
            let (permit, number) = acquired.unwrap_or(Err(Error::PoolTimedOut))?;
            Ok(PoolConnection::new(&inner, permit, number))
        }
    }
}

impl Inner {
    /// Locks the state. The guard must not be held across a step.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    async fn acquire(&self) -> Result<(OwnedSemaphorePermit, u32)> {
        let (mut had_to_wait, mut waiting) =
            (false, pin!(Arc::clone(&self.permits).acquire_owned()));
        let permit = poll_fn(|context| {
            let polled = waiting.as_mut().poll(context);
            had_to_wait |= polled.is_pending();
            polled
        });
        let permit = permit.await.map_err(|_| Error::PoolClosed)?;
        step();
        let idle = self.state().idle.pop();
        if let Some(number) = idle {
            // The caller had found no idle connection, and this one may have returned to the pool
            // since. The caller cannot prevent this race. If the caller did not have to wait, the
            // model therefore does not close the connection of a dropped acquisition.
            let tested = Tested(self, (!had_to_wait).then_some(number));
            sleep(Duration::from_micros(100)).await;
            std::mem::forget(tested);
            return Ok((permit, number));
        }
        self.state().size += 1;
        let opening = Tested(self, None);
        let time = [1, 15, 40][thread_rng().gen_range(0..3)];
        sleep(Duration::from_millis(time)).await;
        if thread_rng().gen_ratio(self.options.failures, 10) {
            return Err(io::Error::from(io::ErrorKind::ConnectionRefused).into());
        }
        std::mem::forget(opening);
        let mut state = self.state();
        state.opened += 1;
        Ok((permit, state.opened))
    }
}

/// A connection that is tested or opened. If the acquisition is dropped, the connection is closed,
/// unless it has a number.
struct Tested<'a>(&'a Inner, Option<u32>);

impl Drop for Tested<'_> {
    fn drop(&mut self) {
        let mut state = self.0.state();
        if let Some(number) = self.1 {
            state.idle.push(number);
        } else {
            state.size -= 1;
            state.closed += u32::from(Instant::since_beginning() < Duration::from_secs(1));
        }
    }
}

pub struct PoolConnection<DB: Database> {
    inner: Arc<Inner>,
    conn: DB::Connection,
    number: u32,
    permit: Option<OwnedSemaphorePermit>,
    closes: bool,
}

impl<DB: Database> PoolConnection<DB> {
    fn new(inner: &Arc<Inner>, permit: OwnedSemaphorePermit, number: u32) -> Self {
        Self {
            inner: Arc::clone(inner),
            conn: number.into(),
            number,
            permit: Some(permit),
            closes: false,
        }
    }

    pub fn close_on_drop(&mut self) {
        self.closes = true;
    }

    pub fn number(&self) -> u32 {
        self.number
    }
}

impl<DB: Database> Deref for PoolConnection<DB> {
    type Target = DB::Connection;

    fn deref(&self) -> &DB::Connection {
        &self.conn
    }
}

impl<DB: Database> DerefMut for PoolConnection<DB> {
    fn deref_mut(&mut self) -> &mut DB::Connection {
        &mut self.conn
    }
}

impl<DB: Database> Drop for PoolConnection<DB> {
    fn drop(&mut self) {
        let way_home = WayHome {
            inner: Arc::clone(&self.inner),
            number: (!self.closes).then_some(self.number),
            permit: self.permit.take(),
        };
        spawn(way_home.go());
    }
}

/// A connection that a task returns to the pool. If this value is dropped first, the connection is
/// closed.
struct WayHome {
    inner: Arc<Inner>,
    number: Option<u32>,
    permit: Option<OwnedSemaphorePermit>,
}

impl WayHome {
    async fn go(mut self) {
        sleep(Duration::from_micros(100)).await;
        if let Some(number) = self.number.take() {
            self.inner.state().idle.push(number);
            self.permit = None;
        }
    }
}

impl Drop for WayHome {
    fn drop(&mut self) {
        if let Some(permit) = self.permit.take() {
            self.inner.state().size -= 1;
            drop(permit);
        }
    }
}
