//! The part of `check` that concerns Redis.

use std::error::Error;

use futures_util::future::join_all;
use redis::RedisResult;
use sqlx::Postgres;
use tower_fence::{Fence, lease::RedisLeases};

use super::report::{Answer, Report, within};
use crate::{
    failure::chain,
    secrets::{address, split_urls},
    serve::redis::{RedisArgs, RedisMode},
};

/// Reports on each configured server. Returns whether any server is configured.
pub async fn check(args: &RedisArgs, report: &mut Report) -> bool {
    let Some(Some(urls)) = report.take("redis", args.urls()) else {
        return false;
    };
    let mut asked = vec![];
    for url in split_urls(urls.expose()) {
        if let Some(client) = report.take("redis", args.client(url)) {
            asked.push(ask(address(url), client));
        }
    }
    let needed = match args.redis_mode {
        RedisMode::Quorum => split_urls(urls.expose()).count() / 2 + 1,
        _ => 1,
    };
    report.members("redis", needed, join_all(asked).await);
    true
}

/// Reports a cluster in which a partition does not accept writes.
///
/// Reports each node of a quorum that replies but cannot be used: as a problem if these nodes and
/// the nodes that do not reply are a majority, and otherwise as a note.
pub async fn check_nodes(args: &RedisArgs, epochs: Fence<Postgres>, report: &mut Report) {
    // `check` and the mounted store report an invalid setting.
    let Ok(Some(urls)) = args.urls() else {
        return;
    };
    let urls: Vec<&str> = split_urls(urls.expose()).collect();
    if args.redis_mode == RedisMode::Cluster
        && let Ok(leases) = args.connect_lazy(RedisLeases::builder(epochs.clone()), &urls)
        && let Err(error) = leases.check_writes(u8::MIN..=u8::MAX).await
    {
        report.problem("redis", chain(&error));
    }
    if args.redis_mode == RedisMode::Quorum
        && let Ok(leases) = args.quorum(epochs, &urls)
    {
        let (failures, silent) = leases.backend().failures().await;
        for failure in &failures {
            let cause = chain(failure.source().unwrap_or(failure));
            match failures.len() + silent > urls.len() / 2 {
                true => report.problem("redis", cause),
                false => report.note("redis", cause),
            }
        }
    }
}

async fn ask(place: String, client: redis::Client) -> Answer {
    let text = within(information(client)).await;
    (place, text.map(|text| version(&text)))
}

/// Returns the answer of a server to INFO; an empty one if the user is not allowed to run INFO.
async fn information(client: redis::Client) -> RedisResult<String> {
    let mut connection = client.get_multiplexed_async_connection().await?;
    let mut info = redis::cmd("INFO");
    let answer = info.arg("server").query_async(&mut connection).await;
    match answer {
        Err(refused) if refused.code() == Some("NOPERM") => Ok(String::new()),
        answer => answer,
    }
}

/// Returns the version from an answer to INFO. Valkey reports its own version, and the version of
/// Redis with which it is compatible.
fn version(information: &str) -> String {
    let value = |name| information.lines().find_map(|line| line.strip_prefix(name));
    match (value("valkey_version:"), value("redis_version:")) {
        (Some(version), _) => format!("Valkey {version}"),
        (None, Some(version)) => format!("Redis {version}"),
        (None, None) => "it answers, but the user is not allowed to read its version (INFO)".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reported_version_is_that_of_the_server() {
        assert_eq!(
            version("# Server\r\nredis_version:7.0.15\r\n"),
            "Redis 7.0.15"
        );
        let valkey = "redis_version:7.2.4\r\nserver_name:valkey\r\nvalkey_version:8.1.1\r\n";
        assert_eq!(version(valkey), "Valkey 8.1.1");
        assert!(version("").contains("INFO"));
    }
}
