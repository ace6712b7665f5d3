//! The command line.

use std::time::Duration;

/// How long everything is measured.
#[derive(Clone, Debug)]
pub struct Options {
    /// How often each contender has its turn.
    pub rounds: usize,
    /// What of a turn is measured, and what before it is not.
    pub window: Window,
    /// Whether the pool tests a connection before it hands it out. sqlx's default.
    pub test_connections: bool,
    /// How much later the database's answers arrive at the service.
    pub latency: Duration,
    /// For a look, not for figures.
    pub quick: bool,
    /// What the names of the contenders have in them that are measured. The baseline always is.
    pub only: Option<String>,
    /// What the titles of the tables have in them that are made.
    pub table: Option<String>,
}

#[derive(Clone, Copy, Debug)]
pub struct Window {
    pub warm_up: Duration,
    pub measured: Duration,
}

impl Options {
    /// Reads the arguments, of which cargo adds `--bench`.
    pub fn read() -> Self {
        let mut options = Self {
            rounds: 5,
            window: Window {
                warm_up: Duration::from_millis(250),
                measured: Duration::from_secs(1),
            },
            test_connections: true,
            latency: Duration::ZERO,
            quick: false,
            only: None,
            table: None,
        };
        let mut arguments = std::env::args().skip(1);
        while let Some(argument) = arguments.next() {
            let mut text = || arguments.next().unwrap_or_else(|| usage(&argument));
            let mut number = || -> f64 { text().parse().unwrap_or_else(|_| usage(&argument)) };
            match argument.as_str() {
                "--bench" => {}
                "--no-test" => options.test_connections = false,
                "--latency" => options.latency = Duration::from_secs_f64(number() / 1_000.0),
                "--rounds" => options.rounds = number() as usize,
                "--seconds" => options.window.measured = Duration::from_secs_f64(number()),
                "--table" => options.table = Some(text()),
                "--only" => options.only = Some(text()),
                "--quick" => {
                    options.quick = true;
                    options.rounds = 3;
                    options.window.warm_up = Duration::from_millis(200);
                    options.window.measured = Duration::from_millis(500);
                }
                _ => usage(&argument),
            }
        }
        options
    }

    /// Whether a table is to be made.
    pub fn wants(&self, title: &str) -> bool {
        title.contains(self.table.as_deref().unwrap_or_default())
    }
}

fn usage(argument: &str) -> ! {
    eprintln!(
        "{argument}? There is:\n\
         --quick        short rounds, for a look\n\
         --rounds N     turns of each contender (5)\n\
         --seconds S    what of a turn is measured (1)\n\
         --latency MS   milliseconds that each answer of the database takes longer (0)\n\
         --only TEXT    contenders with this in their names, and the baseline\n\
         --table TEXT   tables with this in their titles\n\
         --no-test      the pool hands out connections without testing them"
    );
    std::process::exit(2)
}
