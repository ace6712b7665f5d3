//! The cost of floors: for the creation of rows of new resources, and for writes to existing rows.

use sqlx::Postgres;
use tokio::runtime::Runtime;
use tower_fence::{Fence, Resource, Token, TokenUse};

use super::{
    CONNECTIONS, client,
    statements::{FUNCTION, Partitions, WITH_FLOOR, WITHOUT_FLOOR},
    support::{
        options::Options,
        postgres::PostgresServer,
        report::Report,
        rounds::{self, Contender},
        tasks::{self, Operation, Outcome},
    },
    table::{State, Table},
};

const BASELINE: &str = "no floor";

/// Initial rows of both tables.
const ROWS: usize = 1_000;

/// Table without floors, and the fence's table.
struct Tables {
    without: Table,
    with: Table,
}

pub fn race_all(
    runtime: &Runtime,
    server: &PostgresServer,
    options: &Options,
    report: &mut Report,
) {
    let first_writes = if options.quick { 50_000 } else { 1_000_000 };
    let of_all = format!("{first_writes} first writes, 16 connections");
    let of_each_kind = "First writes, 16 connections";
    let to_known = "Writes to existing rows, 16 connections";
    let titles = [&of_all, of_each_kind, to_known];
    if !titles.iter().any(|title| options.wants(title)) {
        return;
    }
    let mut tables = runtime.block_on(Tables::fill(server, options));
    let both = [
        (BASELINE, WITHOUT_FLOOR, &tables.without),
        ("floor", WITH_FLOOR, &tables.with),
    ];
    let of_each = first_writes / CONNECTIONS / options.rounds;
    let all = both.map(|(name, admission, table)| {
        let pgbench = admission.first_writes(server, table, Partitions::All);
        Contender::new(name, move |_| pgbench.run_all(of_each))
    });
    let known = both.map(|(name, admission, table)| {
        let pgbench = admission.writes(server, table, ROWS);
        Contender::new(name, move |window| pgbench.run(window))
    });
    let kinds = [
        (BASELINE, WITHOUT_FLOOR, &tables.without, Partitions::All),
        ("floor", WITH_FLOOR, &tables.with, Partitions::All),
        (
            "floor, one partition",
            WITH_FLOOR,
            &tables.with,
            Partitions::One,
        ),
        ("tower_fence.admit", FUNCTION, &tables.with, Partitions::All),
    ];
    let kinds = kinds.map(|(name, admission, table, partitions)| {
        let pgbench = admission.first_writes(server, table, partitions);
        Contender::new(name, move |window| pgbench.run(window))
    });
    let pool = runtime.block_on(tables.with.pool());
    let fence = Fence::new(pool.clone());
    let begin = (0..CONNECTIONS).map(|_| Begin(fence.clone())).collect();
    let begin = Contender::new("Fence::begin", tasks::turns(runtime, begin));
    let kinds = kinds.into_iter().chain([begin]).collect();
    for (title, contenders) in [
        (of_all.as_str(), all.into()),
        (of_each_kind, kinds),
        (to_known, known.into()),
    ] {
        if !options.wants(title) {
            continue;
        }
        let outcomes = rounds::run(title, BASELINE, contenders, options);
        report.contenders(title, BASELINE, &outcomes);
        if title != to_known {
            for outcome in &outcomes {
                tables.of(&outcome.name).rows += outcome.done() as usize;
            }
        }
    }
    runtime.block_on(pool.close());
    let mut rows = vec![State::columns()];
    for (name, table) in [(BASELINE, &tables.without), ("floor", &tables.with)] {
        rows.push(runtime.block_on(table.state()).row(name));
        runtime.block_on(table.check([].into_iter()));
    }
    report.table("After first writes and writes to existing rows", &rows);
}

impl Tables {
    async fn fill(server: &PostgresServer, options: &Options) -> Self {
        let mut tables = Self {
            without: Table::without_floors(server, "without_floors", options).await,
            with: Table::migrated(server, "with_floors", options).await,
        };
        for table in [&mut tables.without, &mut tables.with] {
            table.fill(ROWS).await;
        }
        tables
    }

    /// Returns the table to which a contender writes.
    fn of(&mut self, contender: &str) -> &mut Table {
        match contender {
            BASELINE => &mut self.without,
            _ => &mut self.with,
        }
    }
}

/// First writes with the crate.
struct Begin(Fence<Postgres>);

impl Operation for Begin {
    async fn run(&mut self) -> Outcome {
        let token = client::next_token();
        let resource = Resource::new(format!("begin-{token}")).expect("a name");
        let token = Token::new(token).expect("a token");
        let tx = self.0.begin(&resource, token, TokenUse::SingleUse).await;
        tx.expect("it is new")
            .commit()
            .await
            .expect("it is written");
        Outcome::Done
    }
}
