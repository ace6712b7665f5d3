//! A fence with a pool of its own.

use sqlx::{Connection, Pool, pool::PoolOptions};

use super::{Fence, sql::FenceDatabase};

impl<DB: FenceDatabase> Fence<DB> {
    /// Opens a pool for this fence, and returns a fence whose connections go from write to write
    /// ([`reuse_connections`](Self::reuse_connections)): the fastest way to write under a token.
    ///
    /// The application can use the same pool: [`get_pool`](Self::get_pool). It has sqlx's default options, such
    /// as at most 10 connections, and one connection to a SQLite in memory;
    /// [`connect_with`](Self::connect_with) takes other options. A
    /// pool that the application has already, with hooks that see each use, is for [`new`](Self::new).
    ///
    /// ```no_run
    /// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
    /// use tower_fence::Fence;
    ///
    /// let fence = Fence::<sqlx::Postgres>::connect("postgres://localhost/shop").await?;
    /// fence.migrate().await?;
    /// let stock: i64 = sqlx::query_scalar("SELECT sum(stock) FROM inventory")
    ///     .fetch_one(fence.get_pool())
    ///     .await?;
    /// # let _ = stock;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// sqlx's error, if the URL is invalid or the database cannot be reached.
    pub async fn connect(url: &str) -> sqlx::Result<Self> {
        Self::connect_with(PoolOptions::new(), url.parse()?).await
    }

    /// Like [`connect`](Self::connect), with options of the pool and of its connections.
    ///
    /// The pool's hooks run when a connection is opened, but rarely between two writes. On Postgres the fence
    /// replaces the `after_connect` of `pool`: its own sets `client_connection_check_interval`, so that the
    /// server ends a statement whose client has disconnected, a [single statement](Self::write) too.
    ///
    /// # Errors
    ///
    /// sqlx's error, if the database cannot be reached.
    pub async fn connect_with(
        pool: PoolOptions<DB>,
        options: <DB::Connection as Connection>::Options,
    ) -> sqlx::Result<Self> {
        let pool: Pool<DB> = DB::own_pool(pool, &options).connect_with(options).await?;
        Ok(Self::new(pool).reuse_connections(true))
    }
}
