//! The SQL functions of the fence, and protected tables. pgbench calls the functions as a program
//! in any language does.

use sqlx::{AssertSqlSafe, PgPool};

use super::{
    Bench, RESOURCES, STOCK,
    scripts::pgbench,
    support::{
        report::{Report, file_name},
        rounds::{self, Contender},
    },
};

const CONNECTIONS: usize = 16;

/// The statement that the crate sends. The one that `tower_fence.admit` executes differs only for a
/// token above the announced one.
const INLINE: &str = "UPDATE tower_fence.resources SET max_token = :token::bigint, \
         updated_at = CURRENT_TIMESTAMP, admitted_by = pg_current_xact_id() \
     WHERE resource = :sku AND max_token < :token::bigint \
         AND (announced >= :token::bigint OR announced_lease IS NULL) \
         AND history = tower_fence.current_history();";

const FUNCTION: &str = "SELECT tower_fence.admit(:sku, :token);";

/// Transactions that admit a token for a resource, and then write all rows of the resource.
///
/// The first contender is the baseline.
struct Race {
    title: &'static str,
    resources: usize,
    rows_of_each: i64,
    contenders: &'static [Writing],
}

struct Writing {
    name: &'static str,
    admit: &'static str,
    protected: bool,
}

const fn writing(name: &'static str, admit: &'static str, protected: bool) -> Writing {
    Writing {
        name,
        admit,
        protected,
    }
}

const PROTECTION: &[Writing] = &[
    writing("unprotected", FUNCTION, false),
    writing("protected", FUNCTION, true),
];

const RACES: [Race; 3] = [
    Race {
        title: "tower_fence.admit, 16 connections",
        resources: RESOURCES,
        rows_of_each: 1,
        contenders: &[
            writing("inline", INLINE, false),
            writing("tower_fence.admit", FUNCTION, false),
        ],
    },
    Race {
        title: "One row of a protected table, 16 connections",
        resources: RESOURCES,
        rows_of_each: 1,
        contenders: PROTECTION,
    },
    Race {
        title: "A thousand rows of a protected table, 16 connections",
        // With this many resources, Postgres can remove the dead versions of a row before its next
        // update.
        resources: 16 * CONNECTIONS,
        rows_of_each: 1_000,
        contenders: PROTECTION,
    },
];

pub fn race_all(bench: &Bench, report: &mut Report) {
    for race in RACES {
        if bench.options.wants(race.title) {
            race.run(bench, report);
        }
    }
}

impl Race {
    fn run(&self, bench: &Bench, report: &mut Report) {
        let baseline = self.contenders[0].name;
        bench.runtime.block_on(self.prepare(&bench.pool));
        let contenders = self.contenders.iter().map(|writing| {
            let table = self.table(writing);
            let statements = format!(
                "BEGIN;\n{}\nUPDATE {table} SET n = n - 1 WHERE sku = :sku;\nCOMMIT;",
                writing.admit
            );
            let pgbench = pgbench(
                &bench.server,
                &statements,
                &table,
                self.resources,
                CONNECTIONS,
            );
            Contender::new(writing.name, move |window| pgbench.run(window))
        });
        let outcomes = rounds::run(self.title, baseline, contenders.collect(), &bench.options);
        for outcome in &outcomes {
            let writing = self.contenders.iter().find(|one| one.name == outcome.name);
            let table = self.table(writing.expect("it is one of them"));
            let decrements = bench.runtime.block_on(self.decrements(&bench.pool, &table));
            let expected = i64::try_from(outcome.done()).expect("not so many") * self.rows_of_each;
            assert_eq!(
                decrements, expected,
                "{table}: the data differs from the answers"
            );
        }
        report.contenders(self.title, baseline, &outcomes);
    }

    /// Creates a table for one contender, whose resources have the table's name as their prefix.
    fn table(&self, writing: &Writing) -> String {
        file_name(&format!("{} {}", self.title, writing.name)).replace('-', "_")
    }

    async fn prepare(&self, pool: &PgPool) {
        for writing in self.contenders {
            let table = self.table(writing);
            let last = self.resources - 1;
            let protect = match writing.protected {
                true => format!("SELECT tower_fence.protect('{table}', '{{sku}}');"),
                false => String::new(),
            };
            let statements = format!(
                "CREATE TABLE {table} (\
                     sku text, line integer, n bigint NOT NULL, PRIMARY KEY (sku, line)\
                 ) WITH (fillfactor = 50); \
                 INSERT INTO {table} SELECT '{table}-' || sku, line, {STOCK} \
                 FROM generate_series(0, {last}) AS sku, generate_series(1, {}) AS line; \
                 SELECT tower_fence.admit(sku, 1) FROM (SELECT DISTINCT sku FROM {table}) AS resource; \
                 {protect} ANALYZE {table};",
                self.rows_of_each
            );
            let prepared = sqlx::raw_sql(AssertSqlSafe(statements)).execute(pool).await;
            prepared.expect("a table");
        }
        for statement in ["VACUUM tower_fence.resources", "CHECKPOINT"] {
            let done = sqlx::raw_sql(statement).execute(pool).await;
            done.expect(statement);
        }
    }

    async fn decrements(&self, pool: &PgPool, table: &str) -> i64 {
        let sum = format!("SELECT CAST(sum({STOCK} - n) AS bigint) FROM {table}");
        let sum = sqlx::query_scalar(AssertSqlSafe(sum)).fetch_one(pool).await;
        sum.expect("the sum")
    }
}
