//! The part of `check` that concerns etcd.

use std::time::Duration;

use futures_util::future::join_all;
use reqwest::Client;
use serde_json::Value;
use tokio::time::timeout;

use super::report::{Answer, Report};
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
    let asked = urls.into_iter().map(|url| ask(&client, url));
    // Each member reports its version, even without a majority. The check of a grant detects a
    // missing majority.
    report.members("etcd", 1, join_all(asked).await);
    true
}

async fn ask(client: &Client, url: &str) -> Answer {
    let answer = match timeout(LIMIT, version(client, url)).await {
        Ok(Ok(version)) => Ok(format!("etcd {version}")),
        Ok(Err(error)) => Err(chain(&error)),
        Err(_) => Err("no answer in time".into()),
    };
    (address(url), answer)
}

/// Returns the version of a member. A member reports it without authentication.
async fn version(client: &Client, url: &str) -> reqwest::Result<String> {
    let url = format!("{}/version", url.trim_end_matches('/'));
    let answer = client.get(url).send().await?.error_for_status()?;
    let answer: Value = answer.json().await?;
    let version = answer["etcdserver"].as_str();
    Ok(version.unwrap_or("of an unknown version").to_owned())
}
