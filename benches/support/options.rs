//! The command-line options.

use std::time::Duration;

/// The options of a measurement.
#[derive(Clone, Debug)]
pub struct Options {
    /// The number of turns of each contender.
    pub rounds: usize,
    /// The part of a turn that is measured, and the warm-up before it.
    pub window: Window,
    /// Whether the pool tests a connection before it returns it, which is the default of sqlx.
    pub test_connections: bool,
    /// The additional delay of the database's responses.
    pub latency: Duration,
    /// Whether this is a quick run, whose figures are not meaningful.
    pub quick: bool,
    /// A part of a name. Only the baseline and contenders whose names contain this text are
    /// measured.
    pub only: Option<String>,
    /// A part of a title. Only tables whose titles contain this text are run.
    pub table: Option<String>,
}

#[derive(Clone, Copy, Debug)]
pub struct Window {
    pub warm_up: Duration,
    pub measured: Duration,
}

impl Options {
    /// Parses the arguments, to which cargo adds `--bench`.
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

    /// Returns whether a table must be run.
    pub fn wants(&self, title: &str) -> bool {
        title.contains(self.table.as_deref().unwrap_or_default())
    }
}

fn usage(argument: &str) -> ! {
    eprintln!(
        "{argument}? There is:\n\
         --quick        shorter rounds, a few minutes in all\n\
         --rounds N     turns of each contender (5)\n\
         --seconds S    the measured length of a round (1)\n\
         --latency MS   milliseconds that each answer of the database takes longer (0)\n\
         --only TEXT    contenders with this in their names, and the baseline\n\
         --table TEXT   tables with this in their titles\n\
         --no-test      the pool returns connections without testing them"
    );
    std::process::exit(2)
}
