//! The leases in Postgres, in a separate database on the server of the bench.

use std::{sync::Arc, time::Duration};

use sqlx::{AssertSqlSafe, PgPool, postgres::PgPoolOptions};
use tokio::runtime::Runtime;
use tower_fence::{Fence, lease::PostgresLeases};

use crate::{
    advisory::AdvisoryLock,
    contenders::{IN_POSTGRES, IN_POSTGRES_REUSE, MAX_WAITERS, TASKS},
    support::{options::Options, postgres::PostgresServer, rounds::Outcome},
};

pub struct PostgresStore {
    runtime: Arc<Runtime>,
    /// The pool with which the bench reads its figures between the tables.
    pool: PgPool,
    plain: PostgresLeases,
    reusing: PostgresLeases,
    advisory: AdvisoryLock,
}

impl PostgresStore {
    pub fn start(runtime: Arc<Runtime>, server: &PostgresServer, options: &Options) -> Self {
        // A waiter for an advisory lock may first have to wait for a session.
        let pool = |database: &str| {
            let pool = PgPoolOptions::new()
                .max_connections(TASKS as u32)
                .min_connections(TASKS as u32)
                .acquire_timeout(Duration::from_secs(120))
                .test_before_acquire(options.test_connections);
            let pool = runtime.block_on(pool.connect(&server.url(database)));
            pool.expect("postgres answers")
        };
        let create = async |pool: PgPool| {
            let created = sqlx::raw_sql("CREATE DATABASE leases").execute(&pool).await;
            created.expect("a database of its own");
            pool.close().await;
        };
        runtime.block_on(create(pool("postgres")));
        // Each contender has its own sessions.
        let [plain, reusing, by_hand] = [(); 3].map(|()| pool("leases"));
        let fence = Fence::new(plain.clone());
        runtime
            .block_on(fence.migrate())
            .expect("the fence's tables");
        let leases = |fence| PostgresLeases::new(fence).max_waiters(MAX_WAITERS);
        let fence_of_reusing = Fence::builder().reuse_connections(true).build(reusing);
        // The store spawns tasks.
        let _runtime = runtime.enter();
        Self {
            plain: leases(fence),
            reusing: leases(fence_of_reusing),
            advisory: AdvisoryLock::new(by_hand),
            pool: plain,
            runtime: Arc::clone(&runtime),
        }
    }

    /// Returns the two contenders with leases in Postgres: one with default settings, and one with
    /// reused connections.
    pub fn both(&self) -> [(&'static str, PostgresLeases); 2] {
        [
            (IN_POSTGRES, self.plain.clone()),
            (IN_POSTGRES_REUSE, self.reusing.clone()),
        ]
    }

    pub fn advisory(&self) -> AdvisoryLock {
        self.advisory.clone()
    }

    fn number(&self, sql: &'static str) -> i64 {
        let number = sqlx::query_scalar(AssertSqlSafe(sql)).fetch_one(&self.pool);
        self.runtime.block_on(number).expect("postgres answers")
    }

    /// Returns the number of committed transactions in this database.
    pub fn transactions(&self) -> u64 {
        // Sessions report the number of their transactions within a second.
        std::thread::sleep(Duration::from_millis(1_500));
        let sum = "SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()";
        u64::try_from(self.number(sum)).expect("a count")
    }

    /// Returns the number of granted leases.
    ///
    /// The tokens of a resource start at the beginning of the first epoch and increase by one.
    pub fn granted(&self) -> u64 {
        let granted = "SELECT coalesce(sum(token - 1000000000), 0)::bigint FROM tower_fence.leases";
        u64::try_from(self.number(granted)).expect("tokens are above the first epoch")
    }

    /// Checks that the number of leases granted since `before` matches the outcomes.
    pub fn assert_granted_since(&self, before: u64, outcomes: &[Outcome]) {
        let ours = outcomes
            .iter()
            .filter(|outcome| [IN_POSTGRES, IN_POSTGRES_REUSE].contains(&&*outcome.name));
        let done: u64 = ours.map(Outcome::done).sum();
        assert_eq!(self.granted() - before, done);
    }

    /// Checks that no lease is held, that no request waits, and that each grant was announced to
    /// the fence.
    pub fn assert_all_free(&self) {
        for (what, count) in [
            ("held", "SELECT count(*) FROM tower_fence.held_leases"),
            ("waits", "SELECT count(*) FROM tower_fence.waiters"),
            (
                "unannounced",
                "SELECT count(*) FROM tower_fence.leases AS l LEFT JOIN tower_fence.resources AS f USING (resource) \
                 WHERE f.announced IS DISTINCT FROM l.token OR f.max_token <> l.token - 1",
            ),
            (
                // The sessions on which issuers listen stay open.
                "locked by hand",
                "SELECT count(*) FROM pg_locks AS l JOIN pg_stat_activity AS a USING (pid) \
                 WHERE l.locktype = 'advisory' AND a.query LIKE '%hashtextextended($1%'",
            ),
        ] {
            assert_eq!(self.number(count), 0, "{what}");
        }
    }
}
