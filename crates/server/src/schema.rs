//! What is done in the database: `migrate`, `distribute`, `schema` and `reset`.

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
/// Where they are current, it only reads. The role needs the right to create tables and functions; the server itself
/// does not.
#[derive(Args)]
pub struct MigrateArgs {
    #[command(flatten)]
    database: DatabaseArgs,
    #[command(flatten)]
    first: FirstMigrationArgs,
}

/// Distributes the fence over the workers of a Citus cluster.
///
/// Each row of the fence is then on the worker that has the rows of TABLE whose distribution column has its name, so
/// that check and write are one transaction of one worker. Once, as the owner of the fence's tables, on the coordinator.
/// Other programs that use the fence have to be restarted afterwards.
#[derive(Args)]
pub struct DistributeArgs {
    /// A table of the application that is distributed by a column of type text, which has the names of the resources.
    /// Without it the rows are anywhere, and each write commits on two workers in two phases.
    table: Option<String>,
    #[command(flatten)]
    database: DatabaseArgs,
}

/// Prints the tables and functions as SQL.
///
/// For those who let another tool or person migrate: `tower-fence schema | psql shop`. One transaction, for a
/// database that has none of it yet.
#[derive(Args)]
pub struct PrintArgs {
    #[command(flatten)]
    schema: SchemaArgs,
    #[command(flatten)]
    first: FirstMigrationArgs,
}

/// Takes a fence back that has seen a token far too high.
///
/// A token that was forged, or came from elsewhere, closes its resource: everything below is stale. This takes the
/// fence back (or up) to --to, in the database itself: every token up to it is dead, every higher one is admissible
/// again. It is not needed where grants are announced, as they are by default: a grant outranks what was seen.
#[derive(Args)]
#[command(after_long_help = CONDITION)]
pub struct ResetArgs {
    /// The resource.
    resource: String,
    /// The highest token that was granted on the resource, never less.
    #[arg(long, value_name = "TOKEN", value_parser = clap::value_parser!(i64).range(1..))]
    to: i64,
    /// Does not ask.
    #[arg(long)]
    yes: bool,
    #[command(flatten)]
    database: DatabaseArgs,
}

const CONDITION: &str = "\
The one condition: from now on nobody may write with a token above --to, for those are alive again.
So --to is the highest token that was granted on this resource, never less; with a lower one, a
holder that was refused writes over its successor. Break the lease first, if there is one
(`tower-fence break`), and wait for its requests to end. What the database knows of grants is
checked: below that, the reset is refused and says what was granted.";

pub async fn migrate(args: MigrateArgs) -> Result<u8, Failure> {
    let (fence, place) = args.database.reached_directly(&args.first).await?;
    database::migrate(&fence, &place).await?;
    print_text(&format!(
        "the tables and functions in {place} are up to date\n"
    ))
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

/// Why a fence cannot be read.
fn unreadable(place: &str, error: AdmitError) -> Failure {
    match error {
        AdmitError::NotMigrated(cause) | AdmitError::Misconfigured(cause) => {
            Failure::configuration(format!("{place}: {}", chain(&cause)))
        }
        error => Failure::unavailable(&format!("cannot read {place}"), &error),
    }
}

/// Within a runtime, which a pool needs that never connects.
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
        "The highest token that is dead on {resource} is {seen}; it will be {token}.\n\n{CONDITION}\n"
    ));
    if !args.yes && !confirmed(&resource)? {
        return Err(Failure::other("nothing was changed"));
    }
    fence.reset(&resource, token).await.map_err(|error| match error {
        ResetError::BelowGranted { granted, .. } => Failure::other(format!(
            "nothing was changed: {granted} was granted on {resource}, or may have been; --to {granted} is the lowest"
        )),
        error => Failure::unavailable("nothing was changed", &error),
    })?;
    print_text(&format!("the fence of {resource} stands at {token}\n"))
}

/// Asks the person at the terminal.
fn confirmed(resource: &tower_fence::Resource) -> Result<bool, Failure> {
    if !io::stdin().is_terminal() {
        return Err(Failure::usage(
            "nobody is here to be asked: say --yes where the condition holds",
        ));
    }
    _ = write!(io::stderr(), "Reset {resource}? Type yes: ");
    let mut answer = String::new();
    let read = io::stdin().read_line(&mut answer);
    Ok(read.is_ok() && answer.trim() == "yes")
}
