//! `tower-fence`: the lease issuer as a server, and its tools.
//!
//! `tower-fence --help` describes the commands; the page `server` of the documentation shows how to
//! use them.

#[cfg(not(unix))]
compile_error!("the program `tower-fence` needs a Unix system; the library also runs on others");

mod args;
mod certificates;
mod client;
mod config;
mod database;
mod database_url;
mod duration;
mod failure;
mod generate;
mod logs;
mod migration;
mod operate;
mod pooler;
mod run;
mod schema;
mod secrets;
mod serve;

use std::{env, process::ExitCode};

use clap::{CommandFactory, error::ErrorKind};
use tokio::{
    runtime::Builder,
    signal::unix::{SignalKind, signal},
};

use self::{
    args::{Command, Line, Unread},
    failure::Failure,
};

fn main() -> ExitCode {
    // If several crypto providers are compiled in, rustls requires an explicit choice.
    let provider = rustls::crypto::ring::default_provider();
    _ = provider.install_default();
    let line = match Line::read(env::args_os()) {
        Ok(line) => line,
        Err(Unread::File(failure)) => return ended(&failure),
        Err(Unread::CommandLine(error)) => {
            let asked = matches!(
                error.kind(),
                ErrorKind::DisplayHelp | ErrorKind::DisplayVersion
            );
            return if asked {
                // This fails only if the reader of the text has closed the pipe.
                _ = error.print();
                ExitCode::SUCCESS
            } else {
                logs::say(error.to_string().trim_end());
                failure::USAGE.into()
            };
        }
    };
    match start(line) {
        Ok(status) => {
            logs::flush();
            status.into()
        }
        Err(failure) => ended(&failure),
    }
}

/// Prints the failure, and returns its exit status.
fn ended(failure: &Failure) -> ExitCode {
    logs::say_exit(&failure.for_people(), failure.status);
    failure.status.into()
}

/// Runs a command, and returns the exit status.
fn start(line: Line) -> Result<u8, Failure> {
    let Line { command, settings } = line;
    let mut builder = match command {
        Command::Serve(_) => Builder::new_multi_thread(),
        _ => Builder::new_current_thread(),
    };
    let runtime = builder.enable_all().build();
    let runtime =
        runtime.map_err(|error| Failure::other(format!("cannot start the runtime: {error}")))?;
    match command {
        Command::Serve(_) => {}
        // `check` reports an invalid log filter together with its other findings.
        Command::Check(_) => _ = logs::start_for_tools(),
        _ => logs::start_for_tools()?,
    }
    let unknown = || config::unknown_variables(&args::Cli::command());
    let status = runtime.block_on(async {
        match command {
            Command::Serve(args) => serve::serve(*args, &unknown()).await,
            Command::Run(args) => run::run(*args).await,
            // This command blocks while it reads from the terminal, so it keeps the default signal
            // handlers.
            Command::Reset(args) => schema::reset(args).await,
            Command::Schema(args) => schema::print(args).await,
            Command::Config(_) => settings.print(),
            Command::Generate(args) => generate::generate(args, args::Cli::command()),
            Command::Leases(args) => until_signal(operate::leases(args)).await,
            Command::Inspect(args) => until_signal(operate::inspect(args)).await,
            Command::Break(args) => until_signal(operate::break_lease(args)).await,
            Command::Migrate(args) => until_signal(schema::migrate(args)).await,
            Command::Distribute(args) => until_signal(schema::distribute(args)).await,
            Command::Check(args) => until_signal(serve::check(*args, &unknown())).await,
        }
    });
    // Do not wait for a thread that still resolves a host name, because that can take a long time.
    runtime.shutdown_background();
    status
}

/// Runs a command until it ends, or until SIGTERM or SIGINT. Without a handler, process 1 would
/// ignore these signals.
async fn until_signal(command: impl Future<Output = Result<u8, Failure>>) -> Result<u8, Failure> {
    let failed = |error| Failure::unavailable("cannot handle signals", &error);
    let mut interrupt = signal(SignalKind::interrupt()).map_err(failed)?;
    let mut terminate = signal(SignalKind::terminate()).map_err(failed)?;
    let by = |name: &str, kind: SignalKind| {
        Failure::new(128 + kind.as_raw_value() as u8, format!("ended by {name}"))
    };
    tokio::select! {
        status = command => status,
        _ = interrupt.recv() => Err(by("SIGINT", SignalKind::interrupt())),
        _ = terminate.recv() => Err(by("SIGTERM", SignalKind::terminate())),
    }
}
