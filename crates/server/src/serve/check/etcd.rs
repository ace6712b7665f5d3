//! The part of `check` that concerns etcd.

use std::time::Duration;

use reqwest::Client;
use serde_json::Value;
use tokio::time::timeout;

use super::report::Report;
use crate::{failure::chain, secrets::address, serve::etcd::EtcdArgs};

/// The timeout for the answer of a member.
const LIMIT: Duration = Duration::from_secs(5);

/// Reports on each configured member. Returns whether any member is configured.
pub async fn look(args: &EtcdArgs, report: &mut Report) -> bool {
    let Some(Some(urls)) = report.take("etcd", args.urls()) else {
        return false;
    };
    let Some(client) = report.take("etcd", args.client(&urls)) else {
        return true;
    };
    for url in urls {
        let place = address(url);
        match timeout(LIMIT, version(&client, url)).await {
            Ok(Ok(version)) => report.ok("etcd", format!("{place}: etcd {version}")),
            Ok(Err(error)) => report.problem("etcd", format!("{place}: {}", chain(&error))),
            Err(_) => report.problem("etcd", format!("{place}: no answer in time")),
        }
    }
    true
}

/// Returns the version of a member. A member reports it without authentication.
async fn version(client: &Client, url: &str) -> reqwest::Result<String> {
    let url = format!("{}/version", url.trim_end_matches('/'));
    let answer = client.get(url).send().await?.error_for_status()?;
    let answer: Value = answer.json().await?;
    let version = answer["etcdserver"].as_str();
    Ok(version.unwrap_or("of an unknown version").to_owned())
}
