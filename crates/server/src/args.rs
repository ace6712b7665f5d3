//! The command line: its commands and their common parts.

use std::{
    any::TypeId,
    env,
    error::Error,
    ffi::{OsStr, OsString},
    path::{Path, PathBuf},
};

use clap::{
    Arg, ArgMatches, CommandFactory, FromArgMatches, Parser, Subcommand,
    error::{ContextKind, ContextValue, ErrorKind},
};

use crate::{
    config,
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
configuration; 128 + N ended by signal N. `tower-fence run --help` lists those of `run`.

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
    /// Prints the settings that `serve` would use.
    ///
    /// Accepts the options and the variables of `serve`, and prints each setting with its origin,
    /// as TOML that --config reads. Secrets are not printed.
    Config(Box<ServeArgs>),
    Schema(PrintArgs),
    // Used when packages are built.
    #[command(hide = true)]
    Generate(GenerateArgs),
}

impl Command {
    /// Returns the settings file, if the command accepts one and it is given.
    fn config_file(&self) -> Option<&Path> {
        match self {
            Self::Serve(args) | Self::Config(args) => args.config.as_deref(),
            Self::Check(args) => args.serve.config.as_deref(),
            _ => None,
        }
    }
}

/// A parsed command line.
pub struct Line {
    pub command: Command,
    pub settings: Settings,
}

/// An invalid command line or settings file, or a request for help.
pub enum Unread {
    CommandLine(clap::Error),
    File(Failure),
}

impl Line {
    /// Parses a command line and the settings file that it names.
    pub fn read(arguments: impl IntoIterator<Item = OsString>) -> Result<Self, Unread> {
        let mut arguments: Vec<_> = arguments.into_iter().collect();
        let with_options = |command: clap::Command| command.mut_args(prepared);
        let program = with_options(Cli::command()).mut_subcommands(with_options);
        let parse = |arguments: &[OsString]| {
            let matches = program.clone().try_get_matches_from(arguments)?;
            Ok((Cli::from_arg_matches(&matches)?.command, matches))
        };
        let (mut command, mut matches) = parse(&arguments).map_err(|error: clap::Error| {
            Unread::CommandLine(with_variable(error, &program, &arguments))
        })?;
        let mut of_file = vec![];
        if let Some(file) = command.config_file() {
            let (subcommand, given) = subcommand(&program, &matches);
            of_file = config::arguments_of(file, subcommand, given).map_err(Unread::File)?;
            // Insert the settings after the names of the program and of the command.
            arguments.splice(2..2, of_file.iter().cloned());
            (command, matches) = parse(&arguments).map_err(|error: clap::Error| {
                Unread::File(Failure::file("cannot use", file, message(&error)))
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

/// The settings that `config` prints: the parsed command line, and the arguments that the settings
/// file has added to it.
pub struct Settings {
    program: clap::Command,
    matches: ArgMatches,
    of_file: Vec<OsString>,
}

impl Settings {
    pub fn print(&self) -> Result<u8, Failure> {
        let (subcommand, given) = subcommand(&self.program, &self.matches);
        config::print(subcommand, given, &self.of_file)
    }
}

/// Returns the subcommand and its arguments.
fn subcommand<'a>(
    program: &'a clap::Command,
    matches: &'a ArgMatches,
) -> (&'a clap::Command, &'a ArgMatches) {
    let found = matches.subcommand().and_then(|(name, given)| {
        let command = program.find_subcommand(name)?;
        Some((command, given))
    });
    found.unwrap_or((program, matches))
}

/// The variable whose blank value does not count as missing. `run` refuses an empty name of a
/// resource, because a script may have built the name from a variable that is not set.
const NEVER_MISSING: &str = "TOWER_FENCE_RESOURCE";

/// Prepares an option for the environment.
fn prepared(arg: Arg) -> Arg {
    // Help texts never show values from the environment, because they may be secrets.
    let arg = arg.hide_env_values(true);
    let variable = arg.get_env().filter(|name| *name != NEVER_MISSING);
    let value = variable.and_then(env::var_os);
    // A blank variable counts as missing. Compose files set a variable without a value to "".
    match value.is_some_and(|value| config::is_blank(&value)) {
        true => arg.env(None::<&'static str>),
        false => arg,
    }
}

/// Returns the option of an error for an invalid value, and the reason. Omits the value, which may
/// be a misplaced secret.
fn invalid_value(error: &clap::Error) -> Option<(String, String)> {
    let Some(ContextValue::String(option)) = error.get(ContextKind::InvalidArg) else {
        return None;
    };
    let reason = match (error.kind(), error.get(ContextKind::ValidValue)) {
        (ErrorKind::ValueValidation, _) => {
            let reason = error.source()?.to_string();
            match reason.split_once(" is not in ") {
                Some((_, range)) => format!("it must be in {range}"),
                None => reason,
            }
        }
        (ErrorKind::InvalidValue, Some(values)) => format!("it must be one of: {values}"),
        _ => return None,
    };
    // The text is that of the help: `--ttl <TIME>`.
    Some((option.split(' ').next()?.to_owned(), reason))
}

/// Returns the message of an error about a settings file, on one line.
fn message(error: &clap::Error) -> String {
    if let Some((option, reason)) = invalid_value(error) {
        return format!("invalid value of {option}: {reason}");
    }
    let text = error.to_string();
    // An empty line and the usage follow the message.
    let lines = text.lines().map(str::trim);
    let lines = lines.take_while(|line| !line.is_empty());
    let message = lines.collect::<Vec<_>>().join(" ");
    message.trim_start_matches("error: ").to_owned()
}

/// Returns the error for an invalid value with the names of the option and of its variable, and
/// without the value.
fn with_variable(
    error: clap::Error,
    program: &clap::Command,
    arguments: &[OsString],
) -> clap::Error {
    let command = arguments
        .get(1)
        .and_then(|name| program.find_subcommand(name));
    let mut options = command.into_iter().flat_map(clap::Command::get_opts);
    let text = if error.kind() == ErrorKind::InvalidUtf8 {
        let is_invalid =
            |name: &&OsStr| env::var_os(name).is_some_and(|value| value.to_str().is_none());
        options
            // A path need not be UTF-8.
            .filter(|option| option.get_value_parser().type_id() != TypeId::of::<PathBuf>())
            .filter_map(Arg::get_env)
            .find(is_invalid)
            .map(|variable| format!("{} is not UTF-8\n", variable.display()))
    } else {
        invalid_value(&error).map(|(name, reason)| {
            let option = options.find(|option| option.get_long() == name.strip_prefix("--"));
            let variable = option.and_then(Arg::get_env);
            let variable = variable.map(|variable| format!(" ({})", variable.display()));
            let variable = variable.unwrap_or_default();
            format!("invalid value of {name}{variable}: {reason}\n")
        })
    };
    match text {
        Some(text) => clap::Error::raw(error.kind(), text),
        None => error,
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
                let env = option
                    .get_env()
                    .map(|env| env.to_string_lossy().into_owned());
                let help = option.get_long_help().map(ToString::to_string);
                let variable = format!("TOWER_FENCE_{name}");
                let named = env.as_deref() == Some(&variable)
                    || help.is_some_and(|help| help.contains(&variable));
                assert!(named, "--{name} of {} has no variable", command.get_name());
            }
        }
    }
}
