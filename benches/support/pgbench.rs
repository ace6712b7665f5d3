//! Measurements of the database alone. pgbench, which is written in C and adds little work, sends
//! the statements.

use std::{
    fs,
    path::PathBuf,
    process::Command,
    sync::atomic::{AtomicI64, Ordering::Relaxed},
    time::Duration,
};

use hdrhistogram::Histogram;
use reqwest::Url;

use super::{
    options::Window,
    postgres::PostgresServer,
    rounds::{Sample, latencies},
};

/// An upper bound of the number of tokens of a run.
const TOKENS_OF_A_RUN: i64 = 10_000_000;

/// The next token.
static TOKENS: AtomicI64 = AtomicI64::new(TOKENS_OF_A_RUN);

/// A script that several clients run with prepared statements.
pub struct Pgbench<'a> {
    server: &'a PostgresServer,
    database: String,
    clients: usize,
    script: String,
}

impl<'a> Pgbench<'a> {
    /// Creates a script from these statements.
    ///
    /// In each transaction, the variable `:token` has a new value, which is higher than in earlier
    /// transactions of the same client. `first` precedes the statements, and contains commands of
    /// pgbench itself.
    pub fn new(
        server: &'a PostgresServer,
        database: &str,
        clients: usize,
        first: &str,
        statements: &str,
    ) -> Self {
        Self {
            server,
            database: database.to_owned(),
            clients,
            script: format!("\\set token :token + 1\n{first}\n{statements}\n"),
        }
    }

    /// Runs the script during the window.
    pub fn run(&self, window: Window) -> Sample {
        // pgbench starts its clock before its clients connect. Each connection takes a while,
        // because Postgres checks the password.
        let mut connecting = 0.3 + self.clients as f64 / 50.0;
        let mut done = 0;
        loop {
            let whole = (window.warm_up + window.measured).as_secs_f64() + connecting;
            let run = self.pgbench(["-T", &whole.ceil().to_string()]);
            // Transactions of attempts that were too short have also changed the data.
            done += run.done;
            if let Some(latencies) = run.within(window) {
                return Sample {
                    latencies,
                    done,
                    ..Sample::new(window.measured)
                };
            }
            connecting *= 2.0;
            assert!(connecting < 60.0, "pgbench has never enough time");
        }
    }

    /// Runs the script until each client has executed this many transactions, and measures all of
    /// them.
    pub fn run_all(&self, of_each: usize) -> Sample {
        let run = self.pgbench(["-t", &of_each.to_string()]);
        let began = run.ended.iter().map(|(end, took)| *end - *took).min();
        let ended = run.ended.iter().map(|(end, _)| *end).max();
        let measured = ended.zip(began).expect("there were some");
        Sample {
            latencies: histogram(run.ended.iter()),
            done: run.done,
            ..Sample::new(measured.0 - measured.1)
        }
    }

    fn pgbench(&self, limit: [&str; 2]) -> Run {
        let folder = tempfile::tempdir().expect("a folder");
        let script = folder.path().join("script.sql");
        fs::write(&script, &self.script).expect("the script was written");
        let url = Url::parse(&self.server.url(&self.database)).expect("a URL");
        let token = TOKENS.fetch_add(TOKENS_OF_A_RUN, Relaxed);
        let output = Command::new(self.server.programs.join("pgbench"))
            .args(["-n", "-M", "prepared", "-j", "1", "--log"])
            .args(["-f", "script.sql", "-D", &format!("token={token}")])
            .args(["-c", &self.clients.to_string()])
            .args(limit)
            .args(["-h", "127.0.0.1", "-p"])
            .arg(url.port().unwrap_or(5432).to_string())
            .args(["-U", url.username(), &self.database])
            .env("PGPASSWORD", url.password().unwrap_or_default())
            .current_dir(folder.path())
            .output()
            .expect("pgbench runs");
        let text = String::from_utf8_lossy(&output.stdout);
        let problems = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{text}{problems}");
        let number = |name: &str| -> Option<u64> {
            let line = text.lines().find_map(|line| line.strip_prefix(name))?;
            // The number is followed by a percentage or by the planned number.
            line.split([' ', '/']).next()?.parse().ok()
        };
        let failed = number("number of failed transactions: ");
        assert!(failed.is_none_or(|failed| failed == 0), "{text}{problems}");
        let logs = fs::read_dir(folder.path()).expect("a folder").flatten();
        let logs = logs.map(|entry| entry.path());
        let is_log = |path: &PathBuf| path.file_name() != script.file_name();
        Run {
            done: number("number of transactions actually processed: ").expect("it says so"),
            ended: logs.filter(is_log).flat_map(read).collect(),
        }
    }
}

/// The results of one run.
struct Run {
    done: u64,
    /// The end and the duration of each transaction.
    ended: Vec<(Duration, Duration)>,
}

impl Run {
    /// Returns the latencies within the window, or `None` if the run ended before the window.
    fn within(&self, window: Window) -> Option<Histogram<u64>> {
        let ends = || self.ended.iter().map(|(end, _)| *end);
        let from = ends().min()? + window.warm_up;
        let until = from + window.measured;
        let within = |(end, _): &&(Duration, Duration)| from <= *end && *end < until;
        (ends().max()? >= until).then(|| histogram(self.ended.iter().filter(within)))
    }
}

fn histogram<'a>(ended: impl Iterator<Item = &'a (Duration, Duration)>) -> Histogram<u64> {
    let mut latencies = latencies();
    for (_, took) in ended {
        latencies.saturating_record(u64::try_from(took.as_nanos()).unwrap_or(u64::MAX));
    }
    latencies
}

/// Parses the log of all transactions.
fn read(log: PathBuf) -> Vec<(Duration, Duration)> {
    let text = fs::read_to_string(log).expect("a log");
    let read_line = |line: &str| {
        // The fields are client, number, microseconds, script, and the end in seconds and
        // microseconds.
        let fields: Vec<u64> = line.split(' ').flat_map(str::parse).collect();
        let &[_, _, took_us, _, seconds, us] = fields.as_slice() else {
            panic!("{line}");
        };
        let end = Duration::from_secs(seconds) + Duration::from_micros(us);
        (end, Duration::from_micros(took_us))
    };
    text.lines().map(read_line).collect()
}
