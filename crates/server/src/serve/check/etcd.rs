//! The part of `check` that concerns etcd.

use futures_util::future::join_all;
use reqwest::Client;
use serde_json::Value;

use super::report::{Answer, Report, within};
use crate::{secrets::address, serve::etcd::EtcdArgs};

/// Reports on each configured member. Returns whether any member is configured.
pub async fn check(args: &EtcdArgs, report: &mut Report) -> bool {
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
    let version = within(version(client, url)).await;
    (
        address(url),
        version.map(|version| format!("etcd {version}")),
    )
}

/// Returns the version of a member. A member reports it without authentication.
async fn version(client: &Client, url: &str) -> reqwest::Result<String> {
    let url = format!("{}/version", url.trim_end_matches('/'));
    let answer = client.get(url).send().await?.error_for_status()?;
    let answer: Value = answer.json().await?;
    let version = answer["etcdserver"].as_str();
    Ok(version.unwrap_or("of an unknown version").to_owned())
}
