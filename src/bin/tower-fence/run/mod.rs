//! `run`: a command under a lease.
//!
//! 1. The command begins when the lease is there, and knows its token.
//! 2. The lease is renewed as long as the command runs.
//! 3. When it is lost, the command is stopped, with all that it has started in its process group.
//! 4. When the command ends, what it has left running is stopped as well, and the lease is released then.
//! 5. In the foreground of a terminal it has no group of its own, and the command alone is stopped.

mod process;
mod signals;

use std::{ffi::OsString, path::Path, time::Duration};

use clap::{Args, builder::BoolishValueParser};
use tokio::time::Instant;
use tower_fence::{
    Resource,
    client::{AcquireError, Holder, LeaseGuard},
    lease::{LeaseError, Leases, Owner, PostgresLeases},
};

use self::{process::Process, signals::Signals};
use crate::{
    client::{self, ClientArgs},
    database::DatabaseArgs,
    duration::duration,
    failure::{self, Failure, chain},
    logs,
    operate::resource,
};

/// Runs a command under a lease.
///
/// The command runs while nobody else has the lease, on whichever machine, and is stopped when the
/// lease is lost: TERM first, KILL after --grace, to its whole process group. TERM, INT, HUP, QUIT,
/// USR1 and USR2 are passed on to it. In its environment are
///
///   FENCING_TOKEN         the token as services want it, in the header Fencing-Token
///   FENCING_TOKEN_NUMBER  the token as a number, for fence_admit
///   LEASE_ID              the secret of the lease
///   LEASE_RESOURCE        the resource
#[derive(Args)]
#[command(after_long_help = STATUSES, verbatim_doc_comment)]
pub struct RunArgs {
    /// What the lease is on. Default: the file name of the command.
    #[arg(long, env = "TOWER_FENCE_RESOURCE", value_name = "NAME")]
    resource: Option<String>,
    /// How long the lease lasts without a renewal; it is renewed at a third of that.
    #[arg(long, env = "TOWER_FENCE_TTL", value_name = "TIME", default_value = "30s", value_parser = duration)]
    ttl: Duration,
    /// How long to wait for the lease, or for the server: 0s not at all, or `forever`.
    #[arg(long, env = "TOWER_FENCE_WAIT", value_name = "TIME", default_value = "0s", value_parser = wait)]
    wait: Duration,
    /// How long the resource stays closed when the lease ends by time, and not by release. As long as --grace, nobody
    /// begins before this command has ended.
    #[arg(long, env = "TOWER_FENCE_LOCK_DELAY", value_name = "TIME", default_value = "0s", value_parser = duration)]
    lock_delay: Duration,
    /// How long the command may take to end after TERM.
    #[arg(long, env = "TOWER_FENCE_GRACE", value_name = "TIME", default_value = "10s", value_parser = duration)]
    grace: Duration,
    /// Who holds the lease, for operators. Default: this machine and process.
    #[arg(long, env = "TOWER_FENCE_OWNER", value_name = "TEXT")]
    owner: Option<String>,
    /// The exit status when the lease is held by another.
    #[arg(short = 'E', long, env = "TOWER_FENCE_CONFLICT_EXIT_CODE", value_name = "STATUS", default_value_t = failure::HELD)]
    conflict_exit_code: u8,
    /// Takes the lease in the Postgres itself, without a server.
    #[arg(long, env = "TOWER_FENCE_DIRECT", value_parser = BoolishValueParser::new())]
    direct: bool,
    #[command(flatten)]
    server: ClientArgs,
    #[command(flatten)]
    database: DatabaseArgs,
    /// The command, and its arguments.
    #[arg(
        required = true,
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "COMMAND"
    )]
    command: Vec<OsString>,
}

const STATUSES: &str = "\
Exit statuses: that of the command, or 128 and the number of the signal that has ended it, and
   64  bad usage
   69  the server or the database does not answer
   75  the lease is held by another; --conflict-exit-code chooses another number
   77  the secret is refused
   78  bad configuration
  124  the lease was lost, and the command was stopped; or it was lost before the command ended
  126  the command cannot be run
  127  there is no such command

A lease is no proof: a machine may be frozen for longer than the lease lasts, with the command on
it. What the command writes is safe where it shows its token, in the transaction of the write:
  SELECT fence_admit('NAME', FENCING_TOKEN_NUMBER)
Each token writes once there; with a third argument, true, until somebody newer writes.

With a terminal at its standard input the command stays in the foreground. Then the terminal
itself tells it of Ctrl-C, and only the command is stopped, not what it has started: give a
script `</dev/null` to have all of it stopped. When tower-fence itself is ended by KILL, nobody
stops the command. Signals that were ignored when it began, as under nohup, stay ignored.

Examples:
  tower-fence run --resource nightly --wait 10m -- ./backup.sh --full
  tower-fence run -E 0 -- ./report.sh        quietly do nothing where another machine does it
  tower-fence run --direct -- ./report.sh    in the Postgres of TOWER_FENCE_DATABASE_URL";

/// The longest time that one request waits in line. Issuers have a limit, of 60 s by default.
const LONGEST_STEP: Duration = Duration::from_secs(50);

pub async fn run(args: RunArgs) -> Result<u8, Failure> {
    let signals = Signals::new()?;
    if args.direct {
        let (fence, _) = args.database.reached().await?;
        return under_lease(PostgresLeases::new(fence), &args, signals).await;
    }
    let leases = args.server.leases()?;
    under_lease(leases, &args, signals).await
}

async fn under_lease<L: Leases + Clone>(
    leases: L,
    args: &RunArgs,
    mut signals: Signals,
) -> Result<u8, Failure> {
    let resource = args.resource()?;
    let holder = Holder::new(leases.clone())
        .ttl(args.ttl)
        .lock_delay(args.lock_delay)
        .owner(args.owner()?);
    let lease = tokio::select! {
        lease = acquire(&leases, &holder, &resource, args.wait) => lease,
        signal = signals.next() => return Ok(128 + signal.as_raw() as u8),
    };
    let lease = lease.map_err(|failure| match failure.status {
        failure::HELD => Failure::new(args.conflict_exit_code, failure.text),
        _ => failure,
    })?;
    let environment = [
        ("FENCING_TOKEN", lease.fencing_token().to_string()),
        ("FENCING_TOKEN_NUMBER", lease.token().to_string()),
        ("LEASE_ID", lease.lease_id().expose().to_owned()),
        ("LEASE_RESOURCE", resource.to_string()),
    ];
    let mut process = match Process::start(&args.command, environment) {
        Ok(process) => process,
        Err(failure) => {
            _ = lease.release().await;
            return Err(failure);
        }
    };
    let status = loop {
        tokio::select! {
            biased;
            loss = lease.lost() => {
                process.stop(args.grace).await;
                let rest = match process.is_in_foreground() {
                    true => ", and what it has started is not: it was in the foreground of the terminal",
                    false => "",
                };
                let text = format!("{}: the command is stopped{rest}", chain(&loss));
                return Err(Failure::new(failure::LOST, text));
            }
            status = process.wait() => break status?,
            signal = signals.next() => process.pass_on(signal),
        }
    };
    // Nothing of it goes on without the lease.
    process.stop(args.grace).await;
    match lease.release().await {
        Ok(()) => Ok(status),
        Err(LeaseError::Lost { .. }) => {
            let text = format!("the lease on {resource} was lost before the command had ended");
            Err(Failure::new(failure::LOST, text))
        }
        Err(error) => {
            let error = chain(&error);
            logs::say(format_args!(
                "tower-fence: the lease on {resource} ends by its time, it could not be released: {error}"
            ));
            Ok(status)
        }
    }
}

/// Takes the lease, within this time.
async fn acquire<L: Leases>(
    leases: &L,
    holder: &Holder<L>,
    resource: &Resource,
    wait: Duration,
) -> Result<LeaseGuard<L>, Failure> {
    // Whoever is refused need not wait.
    if let Err(error) = leases.inspect(resource).await {
        let failure = client::failure(&error);
        if matches!(failure.status, failure::REFUSED | failure::CONFIGURATION) {
            return Err(failure);
        }
    }
    let began = Instant::now();
    let mut longest = LONGEST_STEP;
    loop {
        let left = wait.saturating_sub(began.elapsed());
        let step = holder.clone().wait(left.min(longest));
        let error = match step.acquire(resource).await {
            Ok(lease) => return Ok(lease),
            Err(AcquireError::Lease(error)) => error,
            Err(error) => return Err(Failure::other(chain(&error))),
        };
        let left = wait.saturating_sub(began.elapsed());
        match error {
            // A server with a shorter limit.
            LeaseError::Invalid { ref field, .. } if field == "wait_ms" && !longest.is_zero() => {
                longest = if longest > Duration::from_secs(1) {
                    longest / 2
                } else {
                    Duration::ZERO
                };
            }
            LeaseError::Held { .. }
            | LeaseError::TooManyWaiters { .. }
            | LeaseError::Unavailable(_)
                if !left.is_zero() =>
            {
                // A server that takes no waiters is asked now and then.
                if longest.is_zero() {
                    tokio::time::sleep(left.min(Duration::from_secs(1))).await;
                }
            }
            error => return Err(client::failure(&error)),
        }
    }
}

impl RunArgs {
    fn resource(&self) -> Result<Resource, Failure> {
        match self.resource.as_deref().filter(|name| !name.is_empty()) {
            Some(name) => resource(name),
            None => {
                let command = self.command.first().map(Path::new);
                let name = command.and_then(Path::file_name).unwrap_or_default();
                resource(&name.to_string_lossy())
            }
        }
    }

    fn owner(&self) -> Result<Owner, Failure> {
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
