//! The command line: its commands and their common parts.

use std::{ffi::OsString, path::Path};

use clap::{ArgMatches, CommandFactory, FromArgMatches, Parser, Subcommand};

use crate::{
    config::{self, ConfigArgs},
    failure::Failure,
    generate::GenerateArgs,
    operate::{BreakArgs, InspectArgs, LeasesArgs},
    run::RunArgs,
    schema::{DistributeArgs, MigrateArgs, PrintArgs, ResetArgs},
    serve::{CheckArgs, ServeArgs},
};

/// Leases with fencing tokens, for programs in any language.
///
/// A server that grants leases over HTTP, and tools for it. Each lease has a token that is higher
/// than all earlier tokens of its resource. A writer passes its token to the database
/// (`tower_fence.admit`), which refuses stale tokens.
#[derive(Parser)]
#[command(name = "tower-fence", version, after_long_help = EXAMPLES, arg_required_else_help = true)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

const EXAMPLES: &str = "\
Examples:
  export TOWER_FENCE_DATABASE_URL=postgres://localhost/shop
  tower-fence migrate                     create the tables and functions
  tower-fence serve                       grant leases on http://127.0.0.1:4120/locks
  tower-fence run --resource nightly -- ./backup.sh
                                          run a command under a lease
  tower-fence leases                      list the leases and their holders

A TIME is a number with a unit: 500ms, 30s, 5m, 2h.

Exit statuses: 0 success; 1 a negative answer, or another failure; 64 invalid usage; 69 a server
does not answer; 75 the lease is held by another holder; 77 the secret is rejected; 78 invalid
configuration. `tower-fence run --help` lists those of `run`.

Secrets are read from files or from the environment. They are not accepted on the command line,
because other users of the machine can see it.";

#[derive(Subcommand)]
pub enum Command {
    Serve(Box<ServeArgs>),
    Run(Box<RunArgs>),
    Leases(LeasesArgs),
    Inspect(InspectArgs),
    Break(BreakArgs),
    Reset(ResetArgs),
    Migrate(MigrateArgs),
    Distribute(DistributeArgs),
    Check(Box<CheckArgs>),
    Config(Box<ConfigArgs>),
    Schema(PrintArgs),
    // Used when packages are built.
    #[command(hide = true)]
    Generate(GenerateArgs),
}

/// A parsed command line.
pub struct Line {
    pub command: Command,
    pub settings: Settings,
}

/// The settings that `config` prints: the parsed command line, and the words that the settings file
/// has added to it.
pub struct Settings {
    program: clap::Command,
    matches: ArgMatches,
    of_file: Vec<OsString>,
}

/// An invalid command line or settings file, or a request for help.
pub enum Unread {
    Words(clap::Error),
    File(Failure),
}

impl Line {
    /// Parses a command line and the settings file that it names.
    pub fn read(words: impl IntoIterator<Item = OsString>) -> Result<Self, Unread> {
        let mut words: Vec<_> = words.into_iter().collect();
        // Help texts never show values from the environment, because they may be secrets.
        let hidden = |command: clap::Command| command.mut_args(|arg| arg.hide_env_values(true));
        let program = hidden(Cli::command()).mut_subcommands(hidden);
        let read = |words: &[OsString]| {
            let matches = program.clone().try_get_matches_from(words)?;
            Ok((Cli::from_arg_matches(&matches)?.command, matches))
        };
        let (mut command, mut matches) = read(&words).map_err(Unread::Words)?;
        let mut of_file = vec![];
        if let Some(file) = command.config_file() {
            let (subcommand, given) = below(&program, &matches);
            of_file = config::words_of(file, subcommand, given).map_err(Unread::File)?;
            // The settings of the file follow the names of the program and of the command.
            words.splice(2..2, of_file.iter().cloned());
            (command, matches) = read(&words).map_err(|error: clap::Error| {
                let text = error.to_string();
                let first = text.lines().next().unwrap_or_default();
                let first = first.trim_start_matches("error: ");
                Unread::File(Failure::file("cannot use", file, first))
            })?;
        }
        let settings = Settings {
            program,
            matches,
            of_file,
        };
        Ok(Self { command, settings })
    }
}

impl Settings {
    pub fn print(&self) -> Result<u8, Failure> {
        let (subcommand, given) = below(&self.program, &self.matches);
        config::print(subcommand, given, &self.of_file)
    }
}

/// Returns the subcommand and its arguments.
fn below<'a>(
    program: &'a clap::Command,
    matches: &'a ArgMatches,
) -> (&'a clap::Command, &'a ArgMatches) {
    let found = matches.subcommand().and_then(|(name, given)| {
        let command = program.find_subcommand(name)?;
        Some((command, given))
    });
    found.unwrap_or((program, matches))
}

impl Command {
    /// Returns the settings file, if the command accepts one and it is given.
    fn config_file(&self) -> Option<&Path> {
        match self {
            Self::Serve(args) => args.config.as_deref(),
            Self::Check(args) => args.serve.config.as_deref(),
            Self::Config(args) => args.serve.config.as_deref(),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_line_definition_is_valid() {
        Cli::command().debug_assert();
    }

    #[test]
    fn each_setting_has_a_variable_of_its_name() {
        let set = |command: &&clap::Command| ["serve", "run"].contains(&command.get_name());
        for command in Cli::command().get_subcommands().filter(set) {
            for option in command.get_opts() {
                let name = option.get_long().unwrap().to_uppercase().replace('-', "_");
                let told = option
                    .get_env()
                    .map(|env| env.to_string_lossy().into_owned());
                let help = option.get_long_help().map(ToString::to_string);
                let variable = format!("TOWER_FENCE_{name}");
                let named = told.as_deref() == Some(&variable)
                    || help.is_some_and(|help| help.contains(&variable));
                assert!(named, "--{name} of {} has no variable", command.get_name());
            }
        }
    }
}
