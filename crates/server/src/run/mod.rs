//! `run`: runs a command under a lease.
//!
//! 1. The command starts when the lease is granted, and its environment contains the token.
//! 2. The lease is renewed while a process of the command is alive.
//! 3. If the lease is lost, all processes of the command are stopped: those in its process group,
//!    and on Linux also those that have left the group.
//! 4. When the command ends, its remaining processes are stopped, and then the lease is released.
//! 5. All requests use one lease id, which is chosen before the first request, so that the lease
//!    can be released even if an answer is lost.
//! 6. In the foreground of a terminal, the command has no process group of its own, and only the
//!    command itself is stopped.

mod alive;
mod args;
mod claim;
mod process;
mod release;
mod signals;

use std::{future::pending, time::Duration};

use rustix::process::Signal;
use tokio::time::{Instant, sleep, sleep_until};
use tower_fence::{
    client::{Holder, LeaseGuard, Loss},
    lease::{LeaseId, Leases},
};

pub use self::args::RunArgs;
use self::{claim::Claim, process::Process, release::Released, signals::Signals};
use crate::{
    failure::{self, Failure, chain_on, shown},
    logs,
};

/// Interval between checks of the command's processes. Each CHILD signal causes a further check.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

pub async fn run(args: RunArgs) -> Result<u8, Failure> {
    let mut signals = Signals::new()?;
    if args.direct {
        let (fence, _) = tokio::select! {
            reached = args.database.reached() => reached?,
            signal = signals.interrupt() => return Err(claim::interrupted(signal)),
        };
        let leases = args.database.leases(fence)?;
        return under_lease(leases, &args, signals).await;
    }
    let leases = args.server.leases()?;
    under_lease(leases, &args, signals).await
}

/// The outcome of [`attend`].
enum End {
    /// The command has ended with this status.
    Ended(u8),
    Lost(Loss),
    /// The command ran longer than `--max-time`.
    TimeUp,
}

async fn under_lease<L: Leases + Clone>(
    leases: L,
    args: &RunArgs,
    mut signals: Signals,
) -> Result<u8, Failure> {
    let claim = Claim {
        leases: leases.clone(),
        resource: args.resource()?,
        id: LeaseId::random(),
        ttl: args.ttl,
        release_timeout: args.release_timeout,
    };
    let holder = Holder::new(leases)
        .ttl(args.ttl)
        .lock_delay(args.lock_delay)
        .owner(args.owner()?);
    let lease = match claim.acquire(&holder, args.wait, &mut signals).await {
        Ok(lease) => lease,
        Err(failure) if failure.status == failure::HELD => {
            return match args.conflict_exit_code {
                // If the program printed a text, cron would send it by mail.
                0 => Ok(0),
                status => Err(Failure::new(status, failure.text)),
            };
        }
        Err(failure) => return Err(failure),
    };
    let environment = [
        ("FENCING_TOKEN", lease.fencing_token().to_string()),
        ("FENCING_TOKEN_NUMBER", lease.token().to_string()),
        ("LEASE_RESOURCE", claim.resource.to_string()),
    ];
    process::adopt_orphans();
    let began = Instant::now();
    let mut process = match Process::start(&args.command, environment) {
        Ok(process) => process,
        Err(failure) => {
            let left = lease.remaining();
            claim.release(lease, left, &mut signals).await;
            return Err(failure);
        }
    };
    let ended = attend(&lease, &mut process, &mut signals, began, args.max_time).await;
    let is_gone = process.stop(args.grace, &mut signals).await;
    let outcome = match ended {
        End::Ended(status) => Ok(status),
        End::TimeUp => Err(Failure::new(
            failure::TIME_UP,
            "the command ran longer than --max-time and was stopped",
        )),
        End::Lost(loss) => return Err(lost(&claim, &loss, &mut process).await),
    };
    if !is_gone && let Err(loss) = keep_until_gone(&lease, &mut process, &mut signals).await {
        return Err(lost(&claim, &loss, &mut process).await);
    }
    // A proxy may repeat a release, and the server answers the repetition with "not held".
    // Therefore a renewal before the release checks whether the lease is still held.
    let asked_at = Instant::now();
    let was_held = claim.is_held(lease.token()).await;
    if was_held == Some(false) || (was_held.is_none() && lease.check().is_err()) {
        return Err(lost_before_the_end(&claim));
    }
    let left = match was_held {
        Some(_) => args.ttl.saturating_sub(asked_at.elapsed()),
        None => lease.remaining(),
    };
    let until = began.checked_add(args.at_least);
    match keep_until(&lease, until, process.is_asked_to_end(), &mut signals).await {
        Kept::Whole => {
            let released = claim.release(lease, left, &mut signals).await;
            if matches!(released, Released::NotHeld) && was_held.is_none() {
                return Err(lost_before_the_end(&claim));
            }
        }
        Kept::Interrupted => {
            claim
                .leave(lease, args.at_least.saturating_sub(began.elapsed()))
                .await
        }
        Kept::Lost => claim.release_lost().await,
    }
    outcome
}

/// Forwards signals to the command until it has ended, its lease is lost, or `max_time` has passed.
async fn attend<L: Leases>(
    lease: &LeaseGuard<L>,
    process: &mut Process,
    signals: &mut Signals,
    began: Instant,
    max_time: Option<Duration>,
) -> End {
    let time_is_up = max_time.and_then(|limit| began.checked_add(limit));
    loop {
        if let Some(status) = process.status() {
            return End::Ended(status);
        }
        tokio::select! {
            biased;
            loss = lease.lost() => return End::Lost(loss),
            heard = signals.next() => match heard.signal {
                Signal::CHILD => {}
                Signal::TSTP => {
                    process.pause(heard).await;
                    signals::stop_this_process();
                    // If the lease is lost, the command is not continued, but terminated.
                    if lease.check().is_ok() {
                        process.resume();
                    }
                }
                _ => process.pass_on(heard),
            },
            () = reach(time_is_up) => return End::TimeUp,
            () = sleep(CHECK_INTERVAL) => {}
        }
    }
}

/// Keeps the lease while processes that could not be stopped are alive.
async fn keep_until_gone<L: Leases>(
    lease: &LeaseGuard<L>,
    process: &mut Process,
    signals: &mut Signals,
) -> Result<(), Loss> {
    let mut reported = String::new();
    while let Some(alive) = process.alive() {
        let alive = alive.to_string();
        if reported != alive {
            logs::report(format_args!(
                "processes of the command could not be stopped, and the lease is kept until they have \
                 ended: {alive}"
            ));
            reported = alive;
        }
        process.kill();
        tokio::select! {
            loss = lease.lost() => return Err(loss),
            heard = signals.next() => if heard.is_interrupt() {
                process.pass_on(heard);
            },
            () = sleep(CHECK_INTERVAL) => {}
        }
    }
    Ok(())
}

/// The outcome of keeping the lease for `--at-least`.
enum Kept {
    Whole,
    /// A signal asked this process to exit before that time.
    Interrupted,
    /// The lease was lost, for example because an operator broke it.
    Lost,
}

/// Keeps the lease until this time. Returns `Interrupted` earlier if the command was asked to end,
/// or if a signal asks this process to end.
async fn keep_until<L: Leases>(
    lease: &LeaseGuard<L>,
    until: Option<Instant>,
    is_asked_to_end: bool,
    signals: &mut Signals,
) -> Kept {
    if until.is_some_and(|until| until <= Instant::now()) {
        return Kept::Whole;
    }
    if is_asked_to_end {
        return Kept::Interrupted;
    }
    tokio::select! {
        biased;
        () = reach(until) => Kept::Whole,
        _ = lease.lost() => Kept::Lost,
        _ = signals.interrupt() => Kept::Interrupted,
    }
}

async fn reach(moment: Option<Instant>) {
    match moment {
        Some(moment) => sleep_until(moment).await,
        None => pending().await,
    }
}

/// Returns the failure for a lost lease, after an attempt to stop the command.
async fn lost<L: Leases + Clone>(claim: &Claim<L>, loss: &Loss, process: &mut Process) -> Failure {
    let loss_text = chain_on(loss, &claim.resource);
    if let Some(alive) = process.alive() {
        let text = format!("{loss_text}: the command could not be stopped; still running: {alive}");
        return Failure::new(failure::STILL_RUNNING, text);
    }
    if matches!(loss, Loss::Expired { .. }) {
        claim.release_lost().await;
    }
    let rest = match process.is_in_foreground() {
        true => {
            ", but not the processes that it has started, because it was in the foreground of the terminal"
        }
        false => "",
    };
    Failure::new(
        failure::LOST,
        format!("{loss_text}: the command was stopped{rest}"),
    )
}

fn lost_before_the_end<L>(claim: &Claim<L>) -> Failure {
    let resource = shown(claim.resource.as_str());
    let text = format!("the lease on {resource} was lost before the command ended");
    Failure::new(failure::LOST, text)
}
