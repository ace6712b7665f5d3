//! The commands for the database: `migrate`, `distribute`, `schema` and `reset`.

use std::io::{self, IsTerminal, Write};

use clap::Args;
use sqlx::{PgPool, postgres::PgConnectOptions};
use tower_fence::{AdmitError, Token, fence::ResetError};

use crate::{
    database::{DatabaseArgs, FirstMigrationArgs, SchemaArgs, failed, may_pass},
    failure::{Failure, chain, is_refused, shown},
    logs, migration,
    operate::{print as print_text, resource, token},
};

/// Creates or updates the tables, functions and privileges in the database.
///
/// If they are current, the command only reads. The role needs the privilege to create a schema,
/// tables and functions; the role of the server does not.
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
/// contains the name of the resource. The check and the write run in one transaction on one worker.
/// Run the command once, as the owner of the fence's tables, on the coordinator. Then restart all
/// programs that use the fence.
#[derive(Args)]
pub struct DistributeArgs {
    /// A table of the application that is distributed by a column of type text with the names of
    /// the resources. Without TABLE, a write may change rows on two servers, and then commits in
    /// two phases.
    table: Option<String>,
    #[command(flatten)]
    database: DatabaseArgs,
}

/// Prints the tables and functions as SQL.
///
/// Use this command if another tool or person applies migrations:
/// `tower-fence schema | psql -v ON_ERROR_STOP=1 shop`. The output is one transaction, for a
/// database that does not have the tables yet.
#[derive(Args)]
pub struct PrintArgs {
    #[command(flatten)]
    schema: SchemaArgs,
    #[command(flatten)]
    first: FirstMigrationArgs,
}

/// Unblocks a resource whose fence has received a token that is far too high.
///
/// A token that was forged, or that comes from another source, can block its resource, because
/// every lower token is then stale. This command connects to the database and sets the fence to
/// --to. Tokens up to --to are then stale, and higher tokens are admitted again. If grants are
/// announced, as they are by default, the token of the next grant is above all tokens that the
/// fence has received. The command is then needed only if few tokens are left: renew a lease on the
/// resource with new tokens until the server answers `fence-exhausted`, break the lease, and set
/// --to to the highest token that was granted before the far too high one.
#[derive(Args)]
#[command(after_long_help = CONDITION)]
pub struct ResetArgs {
    /// The resource.
    resource: String,
    /// The highest token that was granted on the resource, never a lower one.
    #[arg(long, value_name = "TOKEN", value_parser = token)]
    to: Token,
    /// Does not ask for confirmation.
    #[arg(long)]
    yes: bool,
    #[command(flatten)]
    database: DatabaseArgs,
}

const CONDITION: &str = "\
Condition: from now on, no client uses an existing token above --to, because the fence admits these
tokens again. Set --to to the highest token that was granted on this resource. If --to were lower,
a holder that was refused could overwrite the data of its successor. If the resource has a lease,
break it first (`tower-fence break`), and wait until the requests of its holder have ended. If --to
is below a grant that the database has recorded, the reset is refused, and the error names the
token of that grant.";

pub async fn migrate(args: MigrateArgs) -> Result<u8, Failure> {
    let (fence, place) = args.database.reached_directly(&args.first).await?;
    let outcome = match migration::migrate(&fence, &place).await? {
        true => "were created or updated",
        false => "are up to date",
    };
    let schema = args.database.schema.name();
    let others = match migration::other_fences(&fence, schema).await {
        Ok(Some(others)) => format!("this database also has a fence in the schema {others}\n"),
        _ => String::new(),
    };
    print_text(&format!(
        "the tables, functions and privileges in {place} {outcome}\n{others}"
    ))
}

pub async fn distribute(args: DistributeArgs) -> Result<u8, Failure> {
    let first = FirstMigrationArgs::default();
    let (fence, place) = args.database.reached_directly(&first).await?;
    let distributed = fence.distribute(args.table.as_deref()).await;
    let distributed = distributed.map_err(|error| match may_pass(&error) {
        true if is_refused(&error) => Failure::unavailable("nothing was changed", &error),
        true => Failure::unavailable(
            &format!(
                "it is unknown whether the fence in {place} was distributed: run the command again"
            ),
            &error,
        ),
        false => Failure::configuration(format!("{place}: {}", chain(&error))),
    })?;
    print_text(&match distributed {
        true => format!("the fence in {place} is distributed: restart the programs that use it\n"),
        false => format!("the fence in {place} is already distributed\n"),
    })
}

/// Prints the tables and functions. This is async because even a pool that never connects needs a
/// runtime.
pub async fn print(args: PrintArgs) -> Result<u8, Failure> {
    let unused = PgPool::connect_lazy_with(PgConnectOptions::new_without_pgpass());
    let fence = args.first.set(args.schema.builder()?).build(unused);
    let sql = fence.schema_sql();
    print_text(&format!("BEGIN;\n\n{}\n\nCOMMIT;\n", sql.trim_end()))
}

pub async fn reset(args: ResetArgs) -> Result<u8, Failure> {
    let resource = resource(&args.resource)?;
    let name = shown(resource.as_str());
    let token = args.to;
    let (fence, place) = args.database.reached().await?;
    let seen = fence.inspect(&resource).await;
    let seen = seen.map_err(|error| failed(&format!("cannot read {place}"), &place, &error))?;
    let seen = seen.map_or_else(|| "none".into(), |seen| seen.to_string());
    logs::say(format_args!(
        "The highest stale token of {name} is {seen}. After the reset, all tokens above {token} are \
         admitted.\n\n{CONDITION}\n"
    ));
    if !args.yes && !confirmed(&name)? {
        return Err(Failure::other("nothing was changed"));
    }
    fence.reset(&resource, token).await.map_err(|error| match error {
        ResetError::BelowGranted { granted, .. } => Failure::other(format!(
            "nothing was changed: token {granted} was granted on {name}, or may have been; --to must be at least {granted}"
        )),
        ResetError::Fence(error) => {
            let what = match error {
                AdmitError::Unavailable(_) if !is_refused(&error) => {
                    "the reset may have been executed: run the command again"
                }
                _ => "nothing was changed",
            };
            failed(what, &place, &error)
        }
        error => Failure::other(chain(&error)),
    })?;
    print_text(&format!(
        "the fence of {name} was reset: all tokens above {token} are admitted\n"
    ))
}

/// Asks for confirmation at the terminal.
fn confirmed(name: &str) -> Result<bool, Failure> {
    if !io::stdin().is_terminal() {
        return Err(Failure::usage(
            "standard input is not a terminal: pass --yes to confirm that the condition holds",
        ));
    }
    _ = write!(io::stderr(), "Reset {name}? Type yes: ");
    let mut answer = String::new();
    let read = io::stdin().read_line(&mut answer);
    Ok(read.is_ok() && answer.trim() == "yes")
}
