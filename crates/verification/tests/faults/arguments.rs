//! The command line: the options of a test program, and the options of the fault run.

use std::time::Duration;

use crate::{run::Options, servers::leases::STORES};

pub struct Arguments {
    pub options: Options,
    /// Lists the tests, and does not run them.
    pub list: bool,
    /// Runs only ignored tests, of which there are none.
    ignored_only: bool,
    filters: Vec<String>,
    skipped: Vec<String>,
}

impl Arguments {
    /// Parses the arguments.
    ///
    /// # Errors
    ///
    /// A description of the invalid argument.
    pub fn parse(given: impl Iterator<Item = String>) -> Result<Self, String> {
        let mut given = given.peekable();
        let mut arguments = Self {
            options: Options {
                length: Duration::from_secs(60),
                seed: rand::random::<u32>().into(),
                store: None,
                clients: 1,
                calm: false,
            },
            list: false,
            ignored_only: false,
            filters: vec![],
            skipped: vec![],
        };
        while let Some(argument) = given.next() {
            let mut value = || given.next().ok_or(format!("{argument} needs a value"));
            match argument.as_str() {
                "--calm" => arguments.options.calm = true,
                "--list" => arguments.list = true,
                "--skip" => arguments.skipped.push(value()?),
                "--seconds" => {
                    let seconds = value()?.parse().map_err(|_| "seconds are a number")?;
                    arguments.options.length = Duration::from_secs(seconds);
                }
                "--seed" => {
                    arguments.options.seed = value()?.parse().map_err(|_| "a seed is a number")?;
                }
                "--clients" => {
                    arguments.options.clients =
                        value()?.parse().map_err(|_| "clients are a number")?;
                }
                "--store" => {
                    let name = value()?;
                    let store = STORES.into_iter().find(|store| *store == name);
                    arguments.options.store = Some(store.ok_or(format!("stores: {STORES:?}"))?);
                }
                "--ignored" => arguments.ignored_only = true,
                // Options of other test programs, which have no effect here.
                "--test-threads" | "--format" | "--color" | "--logfile" | "-Z" => drop(value()?),
                "--nocapture" | "--no-capture" | "--show-output" | "--exact" | "--quiet" | "-q"
                | "--include-ignored" | "--test" | "--bench" | "--report-time" => {}
                option if option.starts_with('-') => {
                    return Err(format!("there is no option {option}"));
                }
                filter => arguments.filters.push(filter.to_owned()),
            }
        }
        Ok(arguments)
    }

    pub fn asks_for(&self, name: &str) -> bool {
        let is_in = |filters: &[String]| filters.iter().any(|filter| name.contains(filter));
        let is_asked_for = self.filters.is_empty() || is_in(&self.filters);
        is_asked_for && !is_in(&self.skipped) && !self.ignored_only
    }
}
