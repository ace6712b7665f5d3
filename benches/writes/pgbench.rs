//! What the database alone can do: the same statements from pgbench, which is in C and has nothing
//! else to do.

use std::{cell::Cell, fs, path::PathBuf, process::Command, time::Duration};

use hdrhistogram::Histogram;
use reqwest::Url;

use super::client::take_tokens;
use crate::support::{
    options::Window,
    postgres::PostgresServer,
    rounds::{Sample, latencies},
};

/// A script, and whether it can be measured on one hot resource.
pub const SCRIPTS: [(&str, &str, bool); 3] = [
    (
        "pgbench, update",
        "UPDATE stock SET n = n - 1 WHERE sku = :sku;",
        true,
    ),
    (
        "pgbench, transaction",
        "BEGIN;\nUPDATE stock SET n = n - 1 WHERE sku = :sku;\nCOMMIT;",
        true,
    ),
    // On one resource somebody would have to try again, as the fence does.
    (
        ONE_STATEMENT,
        "WITH fence AS (\
            UPDATE fence_resources AS f \
            SET max_token = :floor::bigint, updated_at = CURRENT_TIMESTAMP \
            WHERE f.resource = :sku AND f.max_token < :token::bigint AND f.xmin = (\
                SELECT s.xmin FROM fence_resources AS s \
                WHERE s.resource = :sku AND set_config('lock_timeout', '5000ms', true) IS NOT NULL) \
            RETURNING 1\
        ), work AS (\
            UPDATE stock SET n = n - 1 WHERE sku = :sku AND EXISTS (SELECT 1 FROM fence) RETURNING n\
        ) SELECT work.* FROM (SELECT 1) AS always LEFT JOIN work ON true \
        WHERE CASE WHEN EXISTS (SELECT 1 FROM work) AND EXISTS (SELECT 1 FROM fence) THEN true \
            ELSE ('nothing, in ' || pg_backend_pid())::boolean END;",
        false,
    ),
];

/// What `Fence::write` sends.
pub const ONE_STATEMENT: &str = "pgbench, one statement";

/// One script, run by so many clients.
pub struct Pgbench<'a> {
    server: &'a PostgresServer,
    database: &'a str,
    clients: usize,
    script: String,
    done: Cell<u64>,
}

impl<'a> Pgbench<'a> {
    /// `prefix` is what the names of its resources begin with.
    pub fn new(
        server: &'a PostgresServer,
        database: &'a str,
        statements: &str,
        prefix: &str,
        resources: usize,
        clients: usize,
    ) -> Self {
        // As the connections over HTTP: each its own resources, and a new token for each write.
        let of_each = resources / clients;
        let choice = if of_each == 0 {
            "\\set n 0\n".to_owned()
        } else {
            format!(
                "\\set token :token + 1\n\\set floor :token\n\
                 \\set n random(0, {}) * {clients} + :client_id\n",
                of_each - 1
            )
        };
        let sku = format!("('{prefix}-' || :n::text)");
        Self {
            server,
            database,
            clients,
            script: choice + &statements.replace(":sku", &sku) + "\n",
            done: Cell::default(),
        }
    }

    pub fn run(&mut self, window: Window) -> Sample {
        // Its clock begins before it connects, which takes a password each, and a while.
        let mut connecting = 0.3 + self.clients as f64 / 50.0;
        loop {
            if let Some(sample) = self.run_once(window, connecting) {
                return sample;
            }
            connecting *= 2.0;
            assert!(connecting < 60.0, "pgbench has never enough time");
        }
    }

    fn run_once(&self, window: Window, connecting: f64) -> Option<Sample> {
        let folder = tempfile::tempdir().expect("a folder");
        let script = folder.path().join("script.sql");
        fs::write(&script, &self.script).expect("the script was written");
        let url = Url::parse(&self.server.url(self.database)).expect("a URL");
        let whole = (window.warm_up + window.measured).as_secs_f64() + connecting;
        // Tokens that nobody else has, for as many writes as it may make.
        let token = take_tokens(10_000_000);
        let output = Command::new(self.server.programs.join("pgbench"))
            .args(["-n", "-M", "prepared", "-j", "1", "--log"])
            .args(["-f", "script.sql", "-D", &format!("token={token}")])
            .args(["-c", &self.clients.to_string()])
            .args(["-T", &whole.ceil().to_string()])
            .args(["-h", "127.0.0.1", "-p"])
            .arg(url.port().unwrap_or(5432).to_string())
            .args(["-U", url.username(), self.database])
            .env("PGPASSWORD", url.password().unwrap_or_default())
            .current_dir(folder.path())
            .output()
            .expect("pgbench runs");
        let text = String::from_utf8_lossy(&output.stdout);
        let problems = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{text}{problems}");
        let number = |name: &str| -> Option<u64> {
            let line = text.lines().find_map(|line| line.strip_prefix(name))?;
            line.split_whitespace().next()?.parse().ok()
        };
        let failed = number("number of failed transactions: ");
        assert!(failed.is_none_or(|failed| failed == 0), "{text}{problems}");
        let done = number("number of transactions actually processed: ");
        self.done.set(self.done.get() + done.expect("it says so"));
        let logs = fs::read_dir(folder.path()).expect("a folder").flatten();
        let logs = logs.map(|entry| entry.path());
        let is_log = |path: &PathBuf| path.file_name() != script.file_name();
        let latencies = read(logs.filter(is_log), window)?;
        Some(Sample {
            latencies,
            // Those of an attempt that was too short, too.
            done: self.done.take(),
            ..Sample::new(window.measured)
        })
    }
}

/// Reads the log of all transactions; `None` where it ends before the window does.
fn read(logs: impl Iterator<Item = PathBuf>, window: Window) -> Option<Histogram<u64>> {
    let mut ended: Vec<(Duration, u64)> = vec![];
    for log in logs {
        for line in fs::read_to_string(log).expect("a log").lines() {
            // Client, number, microseconds, script, and when it ended: seconds, microseconds.
            let fields: Vec<u64> = line.split(' ').flat_map(str::parse).collect();
            let &[_, _, took_us, _, seconds, us] = fields.as_slice() else {
                panic!("{line}");
            };
            let end = Duration::from_secs(seconds) + Duration::from_micros(us);
            ended.push((end, took_us * 1_000));
        }
    }
    let from = ended.iter().map(|(end, _)| *end).min()? + window.warm_up;
    let until = from + window.measured;
    let last = ended.iter().map(|(end, _)| *end).max()?;
    let mut latencies = latencies();
    for (end, took) in ended {
        if from <= end && end < until {
            latencies.saturating_record(took);
        }
    }
    (last >= until).then_some(latencies)
}
