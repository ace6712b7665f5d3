//! The commands for leases: `leases`, `inspect` and `break`, over HTTP.

use std::io::{self, Write};

use clap::Args;
use serde_json::{Value, json};
use tower_fence::{
    Resource, Token,
    lease::{Held, LeaseAdmin, Leases},
};

use crate::{
    client::{ClientArgs, failure},
    failure::{Failure, shown},
};

/// Lists the leases that are held.
///
/// If the server has secrets, the secret of an operator is required. The remaining times were
/// current when the server responded. Invisible characters of names are shown as `\u{…}`, and
/// backslashes are doubled; --json prints the exact names.
#[derive(Args)]
pub struct LeasesArgs {
    /// Prints a JSON array.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    server: ClientArgs,
}

/// Shows the holder of a lease.
///
/// The secret of a holder is sufficient.
#[derive(Args)]
pub struct InspectArgs {
    /// The resource.
    resource: String,
    /// Prints a JSON object.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    server: ClientArgs,
}

/// Breaks a lease.
///
/// The next waiter receives the lease, with a higher token. The previous holder detects the loss at
/// its next renewal, and can write until the fence has received the next token. If the server has
/// secrets, the secret of an operator is required. If the resource has no lease, or has a lease
/// other than the one to break, the exit status is 1. A lease that has expired is not held,
/// although its lock delay may still block the resource: to end the lock delay, name the token of
/// that lease with --token.
#[derive(Args)]
pub struct BreakArgs {
    /// The resource.
    resource: String,
    /// The token of the lease to break, as `leases` and `inspect` show it. Default: the token of
    /// the lease that is held when the command starts.
    #[arg(long, value_parser = token)]
    token: Option<Token>,
    #[command(flatten)]
    server: ClientArgs,
}

pub async fn leases(args: LeasesArgs) -> Result<u8, Failure> {
    let server = args.server.leases()?;
    let (mut all, mut cursor) = (vec![], None);
    loop {
        let page = server.list(1_000, cursor.as_deref()).await;
        let page = page.map_err(|error| failure(&error))?;
        all.extend(page.leases);
        match page.cursor {
            None => break,
            next => cursor = next,
        }
    }
    if args.json {
        let all: Vec<_> = all
            .iter()
            .map(|(resource, held)| object(resource, held))
            .collect();
        return print(&format!("{:#}\n", Value::from(all)));
    }
    let head = ["RESOURCE", "TOKEN", "OWNER", "SINCE", "LEFT", "WAITERS"].map(String::from);
    let rows = all.iter().map(|(resource, held)| {
        [
            shown(resource.as_str()),
            held.token.to_string(),
            held.owner
                .as_ref()
                .map_or_else(|| "-".into(), |owner| shown(owner.as_str())),
            held.granted_at_text().unwrap_or_else(|| "-".into()),
            format!("{:.1}s", held.ttl.as_secs_f64()),
            held.waiters.to_string(),
        ]
    });
    print(&table([head].into_iter().chain(rows).collect()))
}

pub async fn inspect(args: InspectArgs) -> Result<u8, Failure> {
    let resource = resource(&args.resource)?;
    let name = shown(resource.as_str());
    let held = args.server.leases()?.inspect(&resource).await;
    let held = held.map_err(|error| failure(&error))?;
    let text = match (&held, args.json) {
        (Some(held), true) => format!("{:#}\n", object(&resource, held)),
        (None, true) => format!("{:#}\n", json!({"resource": resource, "held": false})),
        (None, false) => format!("{name} is free\n"),
        (Some(held), false) => format!(
            "{name} is held{}{}, with token {}, for {:.1}s more if it is not renewed; waiters: {}\n",
            held.owner
                .as_ref()
                .map(|owner| format!(" by {}", shown(owner.as_str())))
                .unwrap_or_default(),
            held.granted_at_text()
                .map(|time| format!(" since {time}"))
                .unwrap_or_default(),
            held.token,
            held.ttl.as_secs_f64(),
            held.waiters,
        ),
    };
    print(&text)
}

pub async fn break_lease(args: BreakArgs) -> Result<u8, Failure> {
    let resource = resource(&args.resource)?;
    let name = shown(resource.as_str());
    let server = args.server.leases()?;
    let seen = match args.token {
        Some(token) => Some(token),
        None => {
            let held = server.inspect(&resource).await;
            let held = held.map_err(|error| failure(&error))?;
            held.map(|held| held.token)
        }
    };
    let not_held = || {
        Failure::other(format!(
            "{name} is not held; if an acquisition is still refused, an expired lease with a lock delay, or a lost \
             lease, blocks the resource: name the token of that lease with --token, or send `POST \
             /locks/{{resource}}/break`"
        ))
    };
    let seen = seen.ok_or_else(not_held)?;
    let ended = server.break_lease(&resource, Some(seen)).await;
    if !ended.map_err(|error| failure(&error))? {
        return Err(Failure::other(format!(
            "{name} is not held with token {seen}"
        )));
    }
    print(&format!("the lease on {name} was broken\n"))
}

/// Parses a resource from the command line.
pub fn resource(name: &str) -> Result<Resource, Failure> {
    Resource::new(name).map_err(|error| Failure::usage(format!("invalid resource: {error}")))
}

/// Parses a token from the command line.
pub fn token(text: &str) -> Result<Token, String> {
    let number = text.parse().map_err(|_| "a token must be a whole number")?;
    Token::new(number).map_err(|error| error.to_string())
}

fn object(resource: &Resource, held: &Held) -> Value {
    let mut object = json!(held);
    object["resource"] = json!(resource);
    object["held"] = true.into();
    object
}

/// Formats rows in columns, each as wide as its widest cell.
fn table<const N: usize>(rows: Vec<[String; N]>) -> String {
    let mut widths = [0; N];
    for row in &rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = cell.chars().count().max(*width);
        }
    }
    let mut text = String::new();
    for row in &rows {
        let cells = row.iter().zip(widths);
        let line: Vec<_> = cells
            .map(|(cell, width)| format!("{cell:width$}"))
            .collect();
        text.push_str(line.join("  ").trim_end());
        text.push('\n');
    }
    text
}

/// Prints a text. A reader that has closed the pipe is not an error.
pub fn print(text: &str) -> Result<u8, Failure> {
    match io::stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            Err(Failure::other(format!("cannot print: {error}")))
        }
        _ => Ok(0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_their_cells() {
        let rows = vec![["A", "B"], ["naïve", "1"], ["x", ""]];
        let rows = rows.into_iter().map(|row| row.map(String::from)).collect();
        assert_eq!(table(rows), "A      B\nnaïve  1\nx\n");
    }
}
