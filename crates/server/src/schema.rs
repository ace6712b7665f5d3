//! The commands for the database: `migrate`, `distribute`, `schema` and `reset`.

use std::io::{self, IsTerminal, Write};

use clap::Args;
use sqlx::{PgPool, postgres::PgConnectOptions};
use tower_fence::{AdmitError, Token, fence::ResetError};

use crate::{
    database::{self, DatabaseArgs, FirstMigrationArgs, SchemaArgs},
    failure::{Failure, chain},
    logs,
    operate::{print as print_text, resource},
};

/// Brings the tables and functions in the database up to date.
///
/// If they are current, it only reads. The role needs the privilege to create tables and functions;
/// the role of the server does not.
#[derive(Args)]
pub struct MigrateArgs {
    #[command(flatten)]
    database: DatabaseArgs,
    #[command(flatten)]
    first: FirstMigrationArgs,
}

/// Distributes the fence over the workers of a Citus cluster.
///
/// Each row of the fence is then on the worker that has the rows of TABLE whose distribution column
/// contains the name of the resource. Check and write are one transaction of one worker. Call it
/// once, as the owner of the fence's tables, on the coordinator, and restart other programs that
/// use the fence.
#[derive(Args)]
pub struct DistributeArgs {
    /// A table of the application that is distributed by a column of type text, which contains the
    /// names of the resources. Without it, each write commits on two workers in two phases.
    table: Option<String>,
    #[command(flatten)]
    database: DatabaseArgs,
}

/// Prints the tables and functions as SQL.
///
/// For migrations that another tool or person applies: `tower-fence schema | psql shop`. The output
/// is one transaction, for a database that does not have the tables yet.
#[derive(Args)]
pub struct PrintArgs {
    #[command(flatten)]
    schema: SchemaArgs,
    #[command(flatten)]
    first: FirstMigrationArgs,
}

/// Resets a fence that has seen a token that is far too high.
///
/// A token that was forged, or that comes from another source, can block its resource: every lower
/// token is stale. This command sets the fence to --to, in the database itself: every token up to
/// it is stale, and every higher token is admitted again. It is not needed if grants are announced,
/// as they are by default: the next grant then gets a token above all that the fence has seen.
#[derive(Args)]
#[command(after_long_help = CONDITION)]
pub struct ResetArgs {
    /// The resource.
    resource: String,
    /// The highest token that was granted on the resource, never a lower one.
    #[arg(long, value_name = "TOKEN", value_parser = clap::value_parser!(i64).range(1..))]
    to: i64,
    /// Does not ask for confirmation.
    #[arg(long)]
    yes: bool,
    #[command(flatten)]
    database: DatabaseArgs,
}

const CONDITION: &str = "\
Condition: no client may still use an existing token above --to, because the fence admits those
tokens again. Set --to to the highest token that was granted on this resource, never to a lower
one: a holder that was refused could then overwrite the data of its successor. If the resource has
a lease, break it first (`tower-fence break`), and wait until its requests have ended. If --to is
below a grant that the database has recorded, the reset is refused, and the error names the token
of that grant.";

pub async fn migrate(args: MigrateArgs) -> Result<u8, Failure> {
    let (fence, place) = args.database.reached_directly(&args.first).await?;
    let is_new = matches!(fence.check().await, Err(AdmitError::NotMigrated(_)));
    database::migrate(&fence, &place).await?;
    print_text(&match is_new {
        true => format!("the tables and functions in {place} were created\n"),
        false => format!("the tables and functions in {place} are up to date\n"),
    })
}

pub async fn distribute(args: DistributeArgs) -> Result<u8, Failure> {
    let (fence, place) = args.database.reached().await?;
    let distributed = fence.distribute(args.table.as_deref()).await;
    let distributed = distributed.map_err(|error| match &error {
        sqlx::Error::Database(refused) => {
            Failure::configuration(format!("{place}: {}", refused.message()))
        }
        _ => Failure::unavailable(&format!("{place}: the fence was not distributed"), &error),
    })?;
    print_text(&match distributed {
        true => format!("the fence in {place} is distributed: restart the programs that use it\n"),
        false => format!("the fence in {place} was distributed before\n"),
    })
}

/// Converts an error that occurred when a fence was read.
fn unreadable(place: &str, error: AdmitError) -> Failure {
    match error {
        AdmitError::NotMigrated(cause) | AdmitError::Misconfigured(cause) => {
            Failure::configuration(format!("{place}: {}", chain(&cause)))
        }
        error => Failure::unavailable(&format!("cannot read {place}"), &error),
    }
}

/// Prints the tables and functions. Async, because even a pool that never connects needs a runtime.
pub async fn print(args: PrintArgs) -> Result<u8, Failure> {
    let unused = PgPool::connect_lazy_with(PgConnectOptions::new_without_pgpass());
    let fence = args.first.set(args.schema.builder()?).build(unused);
    let sql = fence.schema_sql();
    print_text(&format!("BEGIN;\n\n{}\n\nCOMMIT;\n", sql.trim_end()))
}

pub async fn reset(args: ResetArgs) -> Result<u8, Failure> {
    let resource = resource(&args.resource)?;
    let token = Token::new(args.to).map_err(|error| Failure::usage(error.to_string()))?;
    let (fence, place) = args.database.reached().await?;
    let seen = fence.inspect(&resource).await;
    let seen = seen.map_err(|error| unreadable(&place, error))?;
    let seen = seen.map_or_else(|| "none".into(), |seen| seen.to_string());
    logs::say(format_args!(
        "The highest stale token on {resource} is {seen}; after the reset, it is {token}.\n\n{CONDITION}\n"
    ));
    if !args.yes && !confirmed(&resource)? {
        return Err(Failure::other("nothing was changed"));
    }
    fence.reset(&resource, token).await.map_err(|error| match error {
        ResetError::BelowGranted { granted, .. } => Failure::other(format!(
            "nothing was changed: token {granted} was granted on {resource}, or may have been; --to must be at least {granted}"
        )),
        error => Failure::unavailable("nothing was changed", &error),
    })?;
    print_text(&format!("the fence of {resource} is now at {token}\n"))
}

/// Asks for confirmation at the terminal.
fn confirmed(resource: &tower_fence::Resource) -> Result<bool, Failure> {
    if !io::stdin().is_terminal() {
        return Err(Failure::usage(
            "standard input is not a terminal: pass --yes to confirm that the condition holds",
        ));
    }
    _ = write!(io::stderr(), "Reset {resource}? Type yes: ");
    let mut answer = String::new();
    let read = io::stdin().read_line(&mut answer);
    Ok(read.is_ok() && answer.trim() == "yes")
}
