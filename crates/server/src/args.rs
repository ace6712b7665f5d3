//! The command line: its commands, and what they have in common.

use std::ffi::OsString;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};

use crate::{
    operate::{BreakArgs, InspectArgs, LeasesArgs},
    run::RunArgs,
    schema::{CheckArgs, MigrateArgs, PrintArgs, ResetArgs},
    serve::ServeArgs,
};

/// Leases with fencing tokens, for programs in any language.
///
/// A server that grants leases over HTTP, and tools around it. Each lease comes with a token that is higher than all
/// before. Whoever writes shows its token to the database (`tower_fence.admit`), which refuses the stale ones.
#[derive(Parser)]
#[command(name = "tower-fence", version, after_long_help = EXAMPLES, arg_required_else_help = true)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

const EXAMPLES: &str = "\
Examples:
  export TOWER_FENCE_DATABASE_URL=postgres://localhost/shop
  tower-fence migrate                     make the tables and functions
  tower-fence serve                       grant leases on http://127.0.0.1:4120/locks
  tower-fence run --resource nightly -- ./backup.sh
                                          run a command under a lease
  tower-fence leases                      who holds what

A TIME is a number and its unit: 500ms, 30s, 5m, 2h.

Exit statuses: 0 success; 1 no, or another failure; 64 bad usage; 69 a server does not answer;
75 the lease is held by another; 77 the secret is refused; 78 bad configuration. `run` has more.

Secrets come from files or the environment, never from the command line, which everybody sees.";

#[derive(Subcommand)]
pub enum Command {
    Serve(Box<ServeArgs>),
    Run(Box<RunArgs>),
    Leases(LeasesArgs),
    Inspect(InspectArgs),
    Break(BreakArgs),
    Reset(ResetArgs),
    Migrate(MigrateArgs),
    Check(CheckArgs),
    Schema(PrintArgs),
}

impl Cli {
    /// Reads a command line. No help shows what is in the environment: it may be a secret.
    pub fn parse_from(words: impl IntoIterator<Item = OsString>) -> Result<Self, clap::Error> {
        let hidden = |command: clap::Command| command.mut_args(|arg| arg.hide_env_values(true));
        let command = hidden(Self::command()).mut_subcommands(hidden);
        Self::from_arg_matches(&command.try_get_matches_from(words)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_sound() {
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
                assert!(named, "--{name} of {} has none", command.get_name());
            }
        }
    }
}
