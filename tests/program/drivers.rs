//! The programs of `examples/drivers`, each of which calls the SQL functions through another
//! driver, and the parts of these programs that the guide shows.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use sqlx::Postgres;

use super::{languages::ADMITS_EVERY_TOKEN, program::words};
use crate::support::{PATIENCE, database::TestDatabase, process::Process, repository, variable};

/// The output of each program.
const STORY: &str = "\
max_token: null
acquire: 1000000001
acquire: TF409 sku-1
held_leases: sku-1 1000000001 worker-1
renew: 1000000002
admit: 1000000002
admit: TF412 1000000001 1000000002
admit_header: 7
release: true
break_lease: false
raise: 4999999999
max_token: 4999999999
protect: true
unfenced write: TF428 sku-1
bypass: true
unprotect: true
remove_idle: 1
remove_idle: 1
stock: 8 4
";

pub const TABLE: &str = include_str!("../../examples/drivers/inventory.sql");

/// Two rows that were last used 30 days ago, and one that was used later.
const IDLE_ROWS: &str = "
    INSERT INTO tower_fence.resources (resource, max_token, updated_at, partition, history)
    SELECT name, 1, now() - days * interval '1 day', tower_fence.partition_of(name), tower_fence.current_history()
    FROM (VALUES ('idle-1', 31), ('idle-2', 31), ('used', 29)) AS rows (name, days)
";

/// Returns a path below the folder in which `tests/run` has installed and built these programs and
/// those of `examples/clients`.
pub fn built(path: &str) -> PathBuf {
    Path::new(&variable("TEST_DRIVERS")).join(path)
}

fn python(program: &str, url: &str) -> Command {
    let mut command = Command::new(built("python/bin/python"));
    command.arg(program).env("DATABASE_URL", url);
    command
}

fn psycopg(url: &str) -> Command {
    python("examples/drivers/psycopg/main.py", url)
}

fn sqlalchemy(url: &str) -> Command {
    python("examples/drivers/sqlalchemy/main.py", url)
}

fn asyncpg(url: &str) -> Command {
    python("examples/drivers/asyncpg/main.py", url)
}

fn prisma(url: &str) -> Command {
    let mut command = Command::new(built("prisma/node_modules/.bin/tsx"));
    command
        .arg(built("prisma/main.ts"))
        .env("DATABASE_URL", url);
    command
}

fn jdbc(url: &str) -> Command {
    let url = reqwest::Url::parse(url).unwrap();
    let address = format!(
        "jdbc:postgresql://{}:{}{}?user={}&password={}",
        url.host_str().unwrap(),
        url.port().unwrap_or(5432),
        url.path(),
        url.username(),
        url.password().unwrap_or_default(),
    );
    let jars = words("postgresql jackson-annotations jackson-core jackson-databind").into_iter();
    let jars: Vec<_> = jars
        .map(|jar| format!("/usr/share/java/{jar}.jar"))
        .collect();
    let mut command = Command::new("java");
    command
        .args(["-cp", &jars.join(":"), "examples/drivers/jdbc/Main.java"])
        .env("DATABASE_URL", address);
    command
}

fn pgx(url: &str) -> Command {
    let mut command = Command::new(built("pgx/main"));
    command.env("DATABASE_URL", url);
    command
}

/// Runs the program on a fresh database, and on one whose fence admits every token.
async fn calls_each_function(command: fn(&str) -> Command) {
    let run = async |setup: &str| {
        let db = Postgres::fresh(1).await;
        for sql in [TABLE, IDLE_ROWS, setup] {
            db.execute(sql).await;
        }
        let mut program = Process::run(command(&db.url));
        // A virtual machine and a compiler start slowly on a busy machine.
        let ended = tokio::time::timeout(5 * PATIENCE, program.ends()).await;
        let success = ended.expect("the program does not end").success();
        (success, program.stdout(), program.log())
    };
    let (success, printed, log) = run("").await;
    assert_eq!(printed, STORY, "{log}");
    assert!(success, "{log}");

    let (success, printed, log) = run(ADMITS_EVERY_TOKEN).await;
    assert!(!success, "{printed}{log}");
    assert_contains!(log, "the stale token was admitted");
}

macro_rules! drivers {
    ($($driver:ident),*) => {
        mod calls_each_function {
            $(#[tokio::test]
            async fn $driver() {
                super::calls_each_function(super::$driver).await;
            })*
        }
    };
}

drivers!(psycopg, sqlalchemy, asyncpg, prisma, jdbc, pgx);

/// Returns the lines of a part of a program, without their indentation.
fn unindented(text: &str) -> String {
    text.lines()
        .map(|line| line.trim().to_owned() + "\n")
        .collect()
}

/// Returns the first code block of a section that begins after the opening fence of that block.
fn shown_code(section: &str) -> &str {
    let (code, _) = section.split_once("\n```").unwrap();
    let (_language, code) = code.split_once('\n').unwrap();
    code
}

/// Checks that each paragraph of the code is in the program, whose indentation was removed.
fn assert_parts_of(whole: &str, code: &str, program: &str) {
    for part in code.split("\n\n") {
        let part = unindented(part);
        assert!(whole.contains(&part), "not in {program}:\n{part}");
    }
}

/// The code in the guide is a part of the programs that the tests run.
#[test]
fn the_guide_shows_parts_of_the_programs() {
    let guide = include_str!("../../src/docs/guide/drivers.md");
    for (heading, program) in [
        ("psycopg 3", "psycopg/main.py"),
        ("SQLAlchemy", "sqlalchemy/main.py"),
        ("asyncpg", "asyncpg/main.py"),
        ("Prisma", "prisma/main.ts"),
        ("JDBC", "jdbc/Main.java"),
        ("pgx", "pgx/main.go"),
    ] {
        let path = repository().join("examples/drivers").join(program);
        let whole = unindented(&fs::read_to_string(path).unwrap());
        let heading = format!("\n# {heading}\n");
        let (_, section) = guide.split_once(&heading).expect(&heading);
        let (introduction, section) = section.split_once("```").unwrap();
        let file = format!("\n`examples/drivers/{program}`");
        assert!(introduction.starts_with(&file), "{introduction}");
        let code = shown_code(section);
        assert_parts_of(&whole, code, program);
        for call in ["admit(", "acquire(", "renew("].map(|name| format!("tower_fence.{name}")) {
            assert_contains!(code, &call);
        }
        assert_contains!(code, "TF412");
    }
}

/// The service in the guide is a part of the example that `clients` runs.
#[test]
fn the_guide_shows_parts_of_the_service() {
    let guide = include_str!("../../src/docs/guide/other-languages.md");
    let program = "examples/clients/service.py";
    let whole = fs::read_to_string(repository().join(program)).unwrap();
    let (_, section) = guide.split_once("\n```python").unwrap();
    let code = shown_code(section);
    assert_parts_of(&unindented(&whole), code, program);
    assert_contains!(code, "tower_fence.admit_header(");
}
