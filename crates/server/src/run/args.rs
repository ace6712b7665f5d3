//! The options of `run`.

use std::{ffi::OsString, time::Duration};

use clap::{Args, builder::BoolishValueParser};
use tower_fence::{Resource, lease::Owner};

use super::name::default_resource;
use crate::{
    client::ClientArgs,
    database::DatabaseArgs,
    duration::duration,
    failure::{self, Failure},
    operate::resource,
};

/// Runs a command under a lease.
///
/// The command runs while no other holder has the lease, on whichever machine, and is stopped when the
/// lease is lost: TERM first, KILL after --grace, to its whole process group. TERM, INT, HUP, QUIT,
/// USR1 and USR2 are passed on to it. In its environment are
///
///   FENCING_TOKEN         the token as services want it, in the header Fencing-Token
///   FENCING_TOKEN_NUMBER  the token as a number, for tower_fence.admit
///   LEASE_ID              the secret of the lease
///   LEASE_RESOURCE        the resource
#[derive(Args)]
#[command(after_long_help = STATUSES, verbatim_doc_comment)]
pub struct RunArgs {
    /// The name of what the lease is on. Default: the file name of the command. A shell, an interpreter or a wrapper
    /// such as env or sudo has no default.
    #[arg(long, env = "TOWER_FENCE_RESOURCE", value_name = "NAME")]
    resource: Option<String>,
    /// How long the lease lasts without a renewal; it is renewed at a third of that.
    #[arg(long, env = "TOWER_FENCE_TTL", value_name = "TIME", default_value = "30s", value_parser = duration)]
    pub ttl: Duration,
    /// How long to wait for the lease, or for the server: 0s not at all, or `forever`.
    #[arg(long, env = "TOWER_FENCE_WAIT", value_name = "TIME", default_value = "0s", value_parser = wait)]
    pub wait: Duration,
    /// How long the resource stays blocked when the lease ends by time, and not by release. If it is as long as
    /// --grace, no other command begins before this one has ended.
    #[arg(long, env = "TOWER_FENCE_LOCK_DELAY", value_name = "TIME", default_value = "0s", value_parser = duration)]
    pub lock_delay: Duration,
    /// How long the command may take to end after TERM.
    #[arg(long, env = "TOWER_FENCE_GRACE", value_name = "TIME", default_value = "10s", value_parser = duration)]
    pub grace: Duration,
    /// Keeps the lease for this long after the command has begun, also when the command ends sooner or fails: machines
    /// whose clocks differ by less then run a short job once.
    #[arg(long, env = "TOWER_FENCE_AT_LEAST", value_name = "TIME", default_value = "0s", value_parser = duration)]
    pub at_least: Duration,
    /// Stops a command that runs for longer than this: TERM, and KILL after --grace. Default: no limit.
    #[arg(long, env = "TOWER_FENCE_MAX_TIME", value_name = "TIME", value_parser = duration)]
    pub max_time: Option<Duration>,
    /// How long a release that fails is retried, but not longer than the lease lasts.
    #[arg(long, env = "TOWER_FENCE_RELEASE_TIMEOUT", value_name = "TIME", default_value = "30s", value_parser = duration)]
    pub release_timeout: Duration,
    /// Who holds the lease, for operators. Default: this machine and process.
    #[arg(long, env = "TOWER_FENCE_OWNER", value_name = "TEXT")]
    owner: Option<String>,
    /// The exit status when the lease is held by another.
    #[arg(short = 'E', long, env = "TOWER_FENCE_CONFLICT_EXIT_CODE", value_name = "STATUS", default_value_t = failure::HELD)]
    pub conflict_exit_code: u8,
    /// Takes the lease in the Postgres itself, without a server.
    #[arg(long, env = "TOWER_FENCE_DIRECT", value_parser = BoolishValueParser::new())]
    pub direct: bool,
    #[command(flatten)]
    pub server: ClientArgs,
    #[command(flatten)]
    pub database: DatabaseArgs,
    /// The command, and its arguments.
    #[arg(
        required = true,
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "COMMAND"
    )]
    pub command: Vec<OsString>,
}

const STATUSES: &str = "\
Exit statuses: that of the command, or 128 and the number of the signal that has ended it, and
    1  another failure of tower-fence itself
   64  bad usage
   69  the server or the database does not answer
   75  the lease is held by another; --conflict-exit-code chooses another number
   77  the secret is refused
   78  bad configuration; or a proxy in front of the server changes the path of requests
  123  the command ran for longer than --max-time, and was stopped
  124  the lease was lost, and the command was stopped; or it was lost before the command ended
  125  the lease was lost, and processes of the command are still running: the log names them
  126  the command cannot be run
  127  there is no such command
  128 and the number of a signal: also when that signal came before the lease was granted

A lease is no proof: a machine may be frozen for longer than the lease lasts, with the command on
it. What the command writes is safe where it shows its token, in the transaction of the write:
  SELECT tower_fence.admit('NAME', FENCING_TOKEN_NUMBER)
Each token writes once there; with a third argument, true, until a newer token writes.

When the command ends, the processes of its group that are left are stopped, and the lease is
released then. A process that cannot be stopped (it has changed its user, or hangs in the kernel)
is named in the log, and the lease is kept until it has ended. If the server does not answer, the
release is retried for --release-timeout.

In the foreground of a terminal the command has no process group of its own. Then the terminal
itself sends it Ctrl-C, and only the command is stopped, not what it has started: give a script
`</dev/null` to have all of it stopped. TSTP stops the command first and tower-fence then; the
lease is not renewed until CONT, and if it is lost by then the command is stopped for good. When
tower-fence itself is ended by KILL, nothing stops the command. Signals that were ignored when
it began, as under nohup, stay ignored.

Examples:
  tower-fence run --resource nightly --wait 10m -- ./backup.sh --full
  tower-fence run -E 0 --at-least 50s -- ./report.sh
                                             from cron each minute, on many machines: one runs it
  tower-fence run --max-time 1h -- ./report.sh
  tower-fence run --direct -- ./report.sh    in the Postgres of TOWER_FENCE_DATABASE_URL";

impl RunArgs {
    pub fn resource(&self) -> Result<Resource, Failure> {
        match (self.resource.as_deref(), self.command.first()) {
            (Some(""), _) => Err(Failure::usage(
                "--resource or TOWER_FENCE_RESOURCE is empty: is a variable in it unset?",
            )),
            (Some(name), _) => resource(name),
            (None, Some(program)) => default_resource(program),
            (None, None) => Err(Failure::usage("no command")),
        }
    }

    pub fn owner(&self) -> Result<Owner, Failure> {
        let owner = self.owner.clone().unwrap_or_else(|| {
            let machine = rustix::system::uname();
            let machine = machine.nodename().to_string_lossy();
            format!("{machine}:{}", std::process::id())
        });
        Owner::new(owner).map_err(|error| Failure::usage(format!("--owner: {error}")))
    }
}

/// Reads how long to wait.
fn wait(text: &str) -> Result<Duration, String> {
    if text == "forever" {
        return Ok(Duration::MAX);
    }
    duration(text).map_err(|error| format!("{error}, or `forever`"))
}
