//! `check`: checks everything that `serve` would use, without serving.
//!
//! 1. Each part of the configuration yields one or more findings. If a part is invalid, the parts
//!    that do not depend on it are still checked.
//! 2. A finding is a problem if `serve` would exit, or would grant no lease.
//! 3. `check` changes nothing and grants nothing. Writes that a check needs are rolled back, and
//!    the port is bound only for a moment.

mod database;
mod etcd;
mod redis;
mod report;

use std::io::ErrorKind;

use clap::Args;
use tower_fence_console::Events;

use self::{database::Needed, report::Report};
use super::{
    access::Access,
    args::ServeArgs,
    listen::{addresses, not_bound, try_bind},
    stop::Stop,
    store::{self, Mounted},
    tls::Tls,
    token_keys,
};
use crate::{certificates, failure::Failure, logs};

/// Checks the configuration of `serve` and the servers that it uses.
///
/// Accepts the options and the variables of `serve`. Reads the files with secrets, keys and
/// certificates, and connects to the database and to Redis or etcd. Prints a line for each finding:
/// versions, the privileges of the role, poolers, missing tables, the difference between the
/// clocks, and whether a grant would succeed. For etcd, it only checks whether the store answers
/// reads. For a quorum of Redis nodes, it checks each node. Changes nothing and grants nothing.
#[derive(Args)]
#[command(after_long_help = STATUSES)]
pub struct CheckArgs {
    /// Prints a JSON array of objects with `level`, `subject` and `text`.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    pub serve: ServeArgs,
}

/// The maximum number of connections of the check, not counting those that detect a pooler.
const CONNECTIONS: u32 = 2;

const STATUSES: &str = "\
Each line has a level, a subject and a text. Problems are printed to standard error, all other
findings to standard output.
  ok       correct
  note     valid, but possibly not intended
  problem  the server would exit, or would grant no lease

Exit statuses: 0 no problem; 64 invalid usage; 78 a problem, for example a database that does not
answer.

Examples:
  TOWER_FENCE_DATABASE_URL=postgres://localhost/shop tower-fence check
  tower-fence check --json --redis-url redis://cache:6379 --database-url-file database-url";

pub async fn check(args: CheckArgs, unknown_variables: &[String]) -> Result<u8, Failure> {
    let mut report = Report::default();
    for variable in unknown_variables {
        let text = format!("{variable} is not a setting, and has no effect");
        report.note("variables", text);
    }
    check_all(&args.serve, &mut report).await;
    report.print(args.json)
}

async fn check_all(args: &ServeArgs, report: &mut Report) {
    if report.take("log", logs::parse_filter(&args.log)).is_some() {
        report.ok("log", args.log.clone());
    }
    let access = report.take("secrets", Access::read(&args.access));
    if let Some(access) = &access {
        report.ok(
            "secrets",
            format!("requests are accepted from {}", access.secrets()),
        );
        let listen = addresses(&args.listen, access).await;
        if let Some(found) = report.take("listen", listen) {
            match try_bind(&found) {
                Ok(()) => report.ok("listen", args.listen.clone()),
                // The server itself may be running.
                Err(error) if error.kind() == ErrorKind::AddrInUse => {
                    let text = format!("{}: the port is in use", args.listen);
                    report.note("listen", text);
                }
                Err(error) => report.problem("listen", not_bound(&args.listen, &error).text),
            }
        }
    }
    if let Some(tls) = report.take("tls", Tls::read(&args.access)) {
        report.ok(
            "tls",
            match tls {
                Some(_) => "the certificate matches its key",
                None => "no certificate: the server accepts plain HTTP",
            },
        );
        if let Some(cert) = &args.access.tls_cert_file
            && let Some(Some(why)) = report.take("tls", certificates::outdated(cert))
        {
            report.note("tls", format!("{why}, so clients refuse it"));
        }
    }
    let keys = report.take("token keys", token_keys(&args.leases));
    if let Some(keys) = &keys {
        let signed = match keys {
            Some(_) => "tokens are signed",
            None => "no keys: tokens are not signed",
        };
        report.ok("token keys", signed);
    }
    let is_outside =
        redis::check(&args.redis, report).await | etcd::check(&args.etcd, report).await;
    let Some((fence, place)) = report.take("database", args.database.fence(CONNECTIONS)) else {
        return;
    };
    let needed = match (is_outside, args.leases.announce) {
        (false, _) => Needed::Leases,
        (true, false) => Needed::Epochs,
        (true, true) => Needed::EpochsAndAnnouncements,
    };
    if args.migrate && report.take("migrate", args.database.direct()).is_some() {
        report.ok(
            "migrate",
            "the server would migrate the database when it starts",
        );
    }
    redis::check_nodes(&args.redis, fence.clone(), report).await;
    let is_fit = database::check(&args.database, &fence, &place, needed, report).await;
    let (Some(access), Some(keys)) = (access, keys) else {
        return;
    };
    let mounted = store::mount(args, fence, keys, &access, Events::new(), Stop::default());
    let Some(Mounted { health, place, .. }) = report.take("leases", mounted) else {
        return;
    };
    report.ok("leases", format!("leases are stored in {place}"));
    if is_fit {
        for (store, probe) in health.into_probes() {
            match probe.check().await {
                Ok(()) => report.ok("grant", format!("the {store} {}", probe.shows)),
                Err(reason) => {
                    report.problem("grant", format!("the {store}: {}", reason.complete));
                }
            }
        }
    }
}
