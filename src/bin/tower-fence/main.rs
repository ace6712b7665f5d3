//! `tower-fence`: the issuer of leases as a server to install, with its tools.
//!
//! `tower-fence --help` says what it does; the page `server` of the documentation says how to use it.

mod args;
mod client;
mod database;
mod duration;
mod failure;
mod logs;
mod operate;
mod run;
mod schema;
mod secrets;
mod serve;

use std::{env, process::ExitCode};

use clap::error::ErrorKind;
use tokio::runtime::Builder;

use self::{
    args::{Cli, Command},
    failure::Failure,
};

fn main() -> ExitCode {
    // With several providers in the program, rustls asks for the choice of one.
    let provider = rustls::crypto::ring::default_provider();
    _ = provider.install_default();
    let cli = match Cli::parse_from(env::args_os()) {
        Ok(cli) => cli,
        Err(error) => {
            // The reader of a help text may be gone.
            _ = error.print();
            let asked = matches!(
                error.kind(),
                ErrorKind::DisplayHelp | ErrorKind::DisplayVersion
            );
            return if asked {
                ExitCode::SUCCESS
            } else {
                failure::USAGE.into()
            };
        }
    };
    match start(cli.command) {
        Ok(status) => status.into(),
        Err(failure) => {
            let text = failure.for_people();
            logs::say(format_args!("tower-fence: {text}"));
            failure.status.into()
        }
    }
}

/// Runs a command, and returns the exit status.
fn start(command: Command) -> Result<u8, Failure> {
    let mut runtime = match command {
        Command::Serve(_) => Builder::new_multi_thread(),
        _ => Builder::new_current_thread(),
    };
    let runtime = runtime.enable_all().build();
    let runtime = runtime.map_err(|error| Failure::other(format!("no runtime: {error}")))?;
    if !matches!(command, Command::Serve(_)) {
        logs::start_for_tools()?;
    }
    runtime.block_on(async {
        match command {
            Command::Serve(args) => serve::serve(*args).await,
            Command::Run(args) => run::run(args).await,
            Command::Leases(args) => operate::leases(args).await,
            Command::Inspect(args) => operate::inspect(args).await,
            Command::Break(args) => operate::break_lease(args).await,
            Command::Reset(args) => schema::reset(args).await,
            Command::Migrate(args) => schema::migrate(args).await,
            Command::Schema => schema::print(),
        }
    })
}
