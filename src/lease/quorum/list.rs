//! Listing, in the order of the names, by SCAN over the lease keys of all nodes: as on a server that is used alone, with
//! each name that any node has.

use futures_util::future::join_all;

use super::{
    node::Node,
    shared::{Quorum, held_by_majority},
};
use crate::lease::{
    ListError, Page,
    redis::{FirstNames, SCAN_SIZE, key_pattern},
};

/// Lists held leases, as [`Operate::list`](crate::lease::Operate::list) does. What a majority has is on one of any nodes of
/// which the others are no majority.
pub(super) async fn list(
    quorum: &Quorum,
    limit: usize,
    cursor: Option<&str>,
) -> Result<Page, ListError> {
    let nodes = &quorum.nodes;
    let mut names = FirstNames::after(cursor, limit)?;
    let begin = nodes.scripts().lease_key_prefix();
    let scans = nodes.all().iter().map(|node| {
        let names = FirstNames::after(cursor, limit);
        async { scan(node, &begin, names?).await }
    });
    let mut failed = 0;
    for scanned in join_all(scans).await {
        match scanned {
            Ok(of_node) => names.merge(of_node),
            Err(error) => {
                failed += 1;
                if failed >= nodes.majority() {
                    return Err(error);
                }
            }
        }
    }
    let (resources, cursor) = names.page();
    let mut leases = vec![];
    for resource in resources {
        let looks = quorum.look(&resource).await?;
        if let Some(held) = held_by_majority(&looks, nodes.majority()) {
            leases.push((resource, held));
        }
    }
    Ok(Page { leases, cursor })
}

/// Scans the lease keys of one node.
async fn scan<'a>(
    node: &Node,
    begin: &str,
    mut names: FirstNames<'a>,
) -> Result<FirstNames<'a>, ListError> {
    let mut scan = 0;
    loop {
        let mut command = redis::cmd("SCAN");
        let command = &*command
            .arg(scan)
            .arg("MATCH")
            .arg(key_pattern(begin))
            .arg("COUNT")
            .arg(SCAN_SIZE);
        let call = |mut connection| async move { command.query_async(&mut connection).await };
        let scanned = node.server().run_again(call).await;
        let ((next, keys), _): ((u64, Vec<Vec<u8>>), _) =
            scanned.map_err(|error| node.server().unavailable(error))?;
        names.add(begin, keys);
        if next == 0 {
            return Ok(names);
        }
        scan = next;
    }
}
