//! The options of `run`.

use std::{ffi::OsString, time::Duration};

use clap::{Args, builder::BoolishValueParser};
use tower_fence::{Resource, lease::Owner};

use crate::{
    client::ClientArgs,
    database::DatabaseArgs,
    duration::{duration, ttl},
    failure::{self, Failure},
    operate::resource,
};

/// Runs a command under a lease
///
/// The command starts when the lease is granted. If the lease is lost, all processes of the command
/// get TERM, and KILL after --grace. Meanwhile, another holder may already have the lease. TERM,
/// INT, HUP, QUIT, USR1 and USR2 are forwarded to the process group of the command. The environment
/// of the command contains:
///
///   FENCING_TOKEN         the token, for the header Fencing-Token of requests
///   FENCING_TOKEN_NUMBER  the token as a number, for tower_fence.admit
///   LEASE_RESOURCE        the resource
#[derive(Args)]
#[command(after_long_help = STATUSES, verbatim_doc_comment)]
pub struct RunArgs {
    /// The name of the resource.
    #[arg(long, env = "TOWER_FENCE_RESOURCE", value_name = "NAME")]
    resource: String,
    /// The duration of the lease without a renewal. It is renewed after at most a third of this
    /// time.
    #[arg(long, env = "TOWER_FENCE_TTL", value_name = "TIME", default_value = "30s", value_parser = ttl)]
    pub ttl: Duration,
    /// How long to wait for the lease, or for an answer from the server: 0s means no wait, and
    /// `forever` means no limit.
    #[arg(long, env = "TOWER_FENCE_WAIT", value_name = "TIME", default_value = "0s", value_parser = wait)]
    pub wait: Duration,
    /// How long the resource stays unavailable after the lease has expired without a release. Set
    /// it to at least --grace, so that no other command starts before this one has stopped. If an
    /// operator breaks the lease, there is no such delay.
    #[arg(long, env = "TOWER_FENCE_LOCK_DELAY", value_name = "TIME", default_value = "0s", value_parser = duration)]
    pub lock_delay: Duration,
    /// How long the command may take to exit after TERM.
    #[arg(long, env = "TOWER_FENCE_GRACE", value_name = "TIME", default_value = "10s", value_parser = duration)]
    pub grace: Duration,
    /// The minimum time for which the lease is kept after the command has started, even if the
    /// command ends earlier or fails. If the clocks of machines differ by less than this time, only
    /// one of them runs a short job. After INT or TERM, the program exits as soon as the command
    /// has ended, and the lease expires at the end of this time, provided that the server allows a
    /// lease of this length.
    #[arg(long, env = "TOWER_FENCE_AT_LEAST", value_name = "TIME", default_value = "0s", value_parser = duration)]
    pub at_least: Duration,
    /// How long the command may run. Then it is stopped with TERM, and with KILL after --grace.
    /// Default: no limit.
    #[arg(long, env = "TOWER_FENCE_MAX_TIME", value_name = "TIME", value_parser = duration)]
    pub max_time: Option<Duration>,
    /// How long a failed release is retried, at most until the lease expires.
    #[arg(long, env = "TOWER_FENCE_RELEASE_TIMEOUT", value_name = "TIME", default_value = "30s", value_parser = duration)]
    pub release_timeout: Duration,
    /// The owner label of the lease, which operators see. Default: the name of this machine and the
    /// process id.
    #[arg(long, env = "TOWER_FENCE_OWNER", value_name = "TEXT")]
    owner: Option<String>,
    /// The exit status if the lease is held by another holder. With 0, nothing is printed.
    #[arg(short = 'E', long, env = "TOWER_FENCE_CONFLICT_EXIT_CODE", value_name = "STATUS", default_value_t = failure::HELD)]
    pub conflict_exit_code: u8,
    /// Acquires the lease in Postgres, without a server. Do not use this option if the servers
    /// store their leases in Redis or etcd, because the lease excludes only other leases in
    /// Postgres.
    #[arg(long, env = "TOWER_FENCE_DIRECT", value_parser = BoolishValueParser::new())]
    pub direct: bool,
    /// The command and its arguments.
    #[arg(required = true, trailing_var_arg = true, value_name = "COMMAND")]
    pub command: Vec<OsString>,
    #[command(flatten)]
    pub server: ClientArgs,
    #[command(flatten)]
    pub database: DatabaseArgs,
}

const STATUSES: &str = "\
Exit statuses: that of the command, or 128 plus the number of the signal that ended it; otherwise
    1  another failure of tower-fence itself
   64  invalid usage
   69  the server or the database does not answer
   75  the lease is held by another holder; --conflict-exit-code sets another status
   77  the secret is rejected
   78  invalid configuration, or a proxy in front of the server changes the request path
  123  the command ran longer than --max-time and was stopped
  124  the lease was lost before the command ended; if the command was running, it was stopped
  125  the lease was lost, and processes of the command are still running: the log names them
  126  the command cannot be executed
  127  the command was not found
  128 plus the number of a signal: the signal arrived before the lease was granted

A lease alone does not prevent late writes: a machine may be suspended for longer than the lease
lasts, and the command then continues without the lease. A write is safe if the command passes its
token to the database in the transaction of the write:
  SELECT tower_fence.admit('NAME', FENCING_TOKEN_NUMBER)
Each token can write once. With true as the third argument, a token can write until a newer token
was admitted or granted. The command cannot renew the lease itself.

When the command ends, its remaining processes are stopped, and then the lease is released. These
are the processes of its group and, on Linux, all processes that it has started, even if they have
left the group, as under timeout or setsid. If a process cannot be stopped, because it has changed
its user or hangs in the kernel, the log names the process, and the lease is kept until the process
has ended. If the server does not answer, the release is retried for --release-timeout.

In the foreground of a terminal, the command has no process group of its own. The terminal then
sends Ctrl-C to the command directly, and tower-fence stops only the command, not the processes that
the command has started. To have all processes of a script stopped, redirect its input with
`</dev/null`.
TSTP suspends first the command, and then tower-fence. The lease is not renewed until CONT. If it is
lost by then, the command is terminated. If tower-fence itself is ended by KILL, nothing stops the
command. Signals that were ignored when tower-fence started, as under nohup, stay ignored.

Examples:
  tower-fence run --resource nightly --wait 10m -- ./backup.sh --full
  tower-fence run --resource report -E 0 --at-least 50s -- ./report.sh
      each minute on several machines, from cron: one runs it
  tower-fence run --resource report --max-time 1h -- ./report.sh
  tower-fence run --resource report --direct -- ./report.sh
      the lease is in the database TOWER_FENCE_DATABASE_URL";

impl RunArgs {
    pub fn resource(&self) -> Result<Resource, Failure> {
        if self.resource.trim().is_empty() {
            return Err(Failure::usage(
                "--resource or TOWER_FENCE_RESOURCE is blank: check whether it uses a variable that is not set",
            ));
        }
        resource(&self.resource)
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

/// Parses the value of `--wait`.
fn wait(text: &str) -> Result<Duration, String> {
    if text == "forever" {
        return Ok(Duration::MAX);
    }
    duration(text).map_err(|error| format!("{error}, or `forever`"))
}
