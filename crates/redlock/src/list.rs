//! Listing of leases in the order of their names, with SCAN over the lease keys of all nodes.
//!
//! For each page, the store scans all keys, and adds their resources to [`Names`]. SCAN returns
//! every key that exists during the whole scan. The cursor of a page is not a SCAN cursor, because
//! a page may end in the middle of the result of one SCAN call, and a repeated call may return more
//! keys or fewer.

use std::collections::HashMap;

use futures_util::future::join_all;
use tower_fence::{
    Resource, Token,
    epochs::partition_of,
    lease::{Held, LeaseError, Owner, Page, backend::Names},
};

use super::{
    QuorumBackend,
    answer::{Answer, Found},
    answers::Answers,
    node::Node,
};

/// Approximate number of keys that one SCAN call visits.
const SCAN_SIZE: usize = 1_000;

impl QuorumBackend {
    /// Lists held leases. If a minority of the nodes does not reply, the others still find every
    /// lease that a majority has.
    pub(crate) async fn list(
        &self,
        limit: usize,
        cursor: Option<&str>,
    ) -> Result<Page, LeaseError> {
        let nodes = &self.nodes;
        let mut names = Names::after(cursor, limit)?;
        let begin = nodes.scripts.lease_key_prefix();
        let scans = nodes.all.iter().map(|node| {
            let names = Names::after(cursor, limit);
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
        if resources.is_empty() {
            return Ok(Page::new(vec![], cursor));
        }
        let read = |_| Some(nodes.scripts.read(&resources));
        let answers = nodes.ask("", read).await?;
        if !answers.are_enough() {
            return Err(answers.no_majority());
        }
        let held = resources.into_iter().enumerate();
        let held = held.filter_map(|(index, resource)| {
            // A lease is also listed if it has a majority only together with nodes that have not
            // replied.
            let held = held_by(&answers, index, answers.needed())?;
            Some((resource, held))
        });
        Ok(Page::new(held.collect(), cursor))
    }
}

/// Returns the lease that `needed` nodes have, under the same lease id and with the same token, on
/// the resource with this index in the replies.
pub(crate) fn held_by(answers: &Answers, index: usize, needed: usize) -> Option<Held> {
    let mut held: HashMap<(&str, Token), Vec<_>> = HashMap::new();
    for (_, answer) in &answers.given {
        if let Answer::Found(answers) = answer
            && let Some(Some(found)) = answers.get(index)
            && let Found {
                lease,
                token: Some(token),
                left: Some(left),
                owner,
                ..
            } = found
        {
            let same = held.entry((lease, *token)).or_default();
            same.push((*left, owner));
        }
    }
    // If few nodes have replied, `needed` is low, and several leases may be on that many nodes.
    let most = held
        .into_iter()
        .max_by_key(|((_, token), nodes)| (nodes.len(), *token));
    let ((_, token), mut nodes) = most.filter(|(_, nodes)| nodes.len() >= needed)?;
    // The lease ends when its key has expired on so many nodes that the others are not a majority.
    nodes.sort_unstable_by_key(|(left, _): &(_, &Option<Owner>)| std::cmp::Reverse(*left));
    let (ttl, owner) = nodes.get(needed - 1)?;
    Some(Held::new(token, *ttl).owner((*owner).clone()))
}

/// Scans the lease keys of one node.
async fn scan<'a>(node: &Node, begin: &str, mut names: Names<'a>) -> Result<Names<'a>, LeaseError> {
    let mut next = 0_u64;
    loop {
        let mut command = redis::cmd("SCAN");
        let command = &*command
            .arg(next)
            .arg("MATCH")
            .arg(format!("{begin}*}}:lease:*"))
            .arg("COUNT")
            .arg(SCAN_SIZE);
        let call = |mut connection| async move { command.query_async(&mut connection).await };
        let scanned = node.server.command(call).await;
        let ((cursor, keys), _): ((u64, Vec<Vec<u8>>), _) =
            scanned.map_err(|error| node.server.lease_error(error))?;
        let resources = keys
            .into_iter()
            .filter_map(|key| resource_of_key(begin, key));
        resources.for_each(|resource| names.add(&resource));
        if cursor == 0 {
            return Ok(names);
        }
        next = cursor;
    }
}

/// Returns the resource of a lease key, or `None` if this store has not written the key.
fn resource_of_key(begin: &str, key: Vec<u8>) -> Option<Resource> {
    let key = String::from_utf8(key).ok()?;
    let (partition, name) = key.strip_prefix(begin)?.split_once("}:lease:")?;
    let resource = Resource::new(name).ok()?;
    (partition_of(&resource).to_string() == partition).then_some(resource)
}
