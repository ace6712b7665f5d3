//! The advisory locks of Postgres. Each holder and each waiter occupies a session of a pool. The
//! locks have no token and no TTL, and are not stored.

use sqlx::{PgPool, Postgres, pool::PoolConnection};

#[derive(Clone)]
pub struct AdvisoryLock {
    pool: PgPool,
}

/// The session that holds the lock.
pub struct Held(PoolConnection<Postgres>);

impl AdvisoryLock {
    pub const fn new(pool: PgPool) -> Self {
        Self { pool }
    }

    pub async fn lock(&self, name: &str) -> Held {
        let mut session = self.pool.acquire().await.expect("a session");
        let lock = "SELECT pg_advisory_lock(hashtextextended($1, 0))";
        let locked = sqlx::query(lock).bind(name).execute(&mut *session).await;
        locked.expect("postgres answers");
        Held(session)
    }

    pub async fn unlock(&self, name: &str, held: Held) {
        let Held(mut session) = held;
        let unlock = "SELECT pg_advisory_unlock(hashtextextended($1, 0))";
        let unlocked = sqlx::query_scalar(unlock)
            .bind(name)
            .fetch_one(&mut *session);
        let unlocked: bool = unlocked.await.expect("postgres answers");
        assert!(unlocked, "it was not locked");
    }
}
