//! Listing, by SCAN over the lease keys of one node after the other.

use std::fmt;

use super::{
    answer::Answer,
    node::Node,
    nodes::Nodes,
    shared::{Quorum, held_by_majority},
};
use crate::{
    lease::{
        LeaseError, ListError, Page,
        redis::{key_pattern, resource_of_key},
    },
    token::Resource,
};

/// Where a page begins: at a node, the cursor of a SCAN there, and the name that was listed last of what it finds.
/// Which of the nodes before could not be scanned is a set of bits.
#[derive(Clone, Default)]
pub(super) struct Cursor {
    node: usize,
    scan: u64,
    skipped: u64,
    after: String,
}

impl Cursor {
    /// Reads the cursor of a page. A node that was passed over comes before the one that is next, and they were no
    /// majority: otherwise a lease would be listed once more, or some would be missed unsaid.
    pub(super) fn parse(text: &str, nodes: &Nodes) -> Result<Self, ListError> {
        let mut parts = text.splitn(4, '-');
        let mut next = || parts.next().ok_or(ListError::Cursor);
        let cursor = Self {
            node: next()?.parse().map_err(|_| ListError::Cursor)?,
            scan: next()?.parse().map_err(|_| ListError::Cursor)?,
            skipped: next()?.parse().map_err(|_| ListError::Cursor)?,
            after: next()?.to_owned(),
        };
        let is_given = cursor.node < nodes.all().len()
            && cursor.skipped >> cursor.node == 0
            && cursor.skipped_count() < nodes.majority();
        is_given.then_some(cursor).ok_or(ListError::Cursor)
    }

    fn at_next_node(self) -> Self {
        Self {
            node: self.node.saturating_add(1),
            skipped: self.skipped,
            ..Self::default()
        }
    }

    fn has_skipped(&self, node: usize) -> bool {
        self.skipped >> node & 1 == 1
    }

    fn skipped_count(&self) -> usize {
        self.skipped.count_ones() as usize
    }
}

/// As [`Cursor::parse`] reads it.
impl fmt::Display for Cursor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}-{}-{}-{}",
            self.node, self.scan, self.skipped, self.after
        )
    }
}

/// How many times to look on until a page is full: other keys may lie between the leases.
const SCANS_PER_PAGE: usize = 100;

/// Lists held leases, as [`Operate::list`](crate::lease::Operate::list) does. What a majority has is on each node but a
/// few, so those few need not be scanned.
pub(super) async fn list(
    quorum: &Quorum,
    limit: usize,
    cursor: Option<&str>,
) -> Result<Page, ListError> {
    let (nodes, limit) = (&quorum.nodes, limit.max(1));
    let mut at = match cursor {
        Some(cursor) => Cursor::parse(cursor, nodes)?,
        None => Cursor::default(),
    };
    let mut page = Page::default();
    for _ in 0..SCANS_PER_PAGE {
        let Some(node) = nodes.all().get(at.node) else {
            page.cursor = None;
            break;
        };
        match scan(quorum, node, &at, limit).await {
            Ok((scan, mut found)) => {
                found.sort_unstable_by(|a, b| a.as_str().cmp(b.as_str()));
                found.dedup();
                found.retain(|resource| resource.as_str() > at.after.as_str());
                let rest = found.split_off(found.len().min(limit - page.leases.len()));
                let last = found.last().map(|resource| resource.as_str().to_owned());
                for resource in found {
                    list_one(quorum, resource, &at, &mut page).await?;
                }
                at = match (last.filter(|_| !rest.is_empty()), scan) {
                    (Some(after), _) => Cursor { after, ..at },
                    (None, 0) => at.at_next_node(),
                    (None, scan) => Cursor {
                        scan,
                        after: String::new(),
                        ..at
                    },
                };
            }
            Err(error) => {
                at.skipped |= 1 << at.node;
                if at.skipped_count() >= nodes.majority() {
                    return Err(error.into());
                }
                at = at.at_next_node();
            }
        }
        let more = at.node < nodes.all().len();
        page.cursor = more.then(|| at.to_string());
        if !more || page.leases.len() == limit {
            break;
        }
    }
    Ok(page)
}

/// Lists one lease, unless a node that was scanned before has it, too.
async fn list_one(
    quorum: &Quorum,
    resource: Resource,
    at: &Cursor,
    page: &mut Page,
) -> Result<(), LeaseError> {
    let looks = quorum.look(&resource).await?;
    let listed_before = looks.given.iter().any(|(node, answer)| {
        *node < at.node && !at.has_skipped(*node) && matches!(answer, Answer::Found(_))
    });
    if let Some(held) = held_by_majority(&looks, quorum.nodes.majority())
        && !listed_before
    {
        page.leases.push((resource, held));
    }
    Ok(())
}

/// Some resources whose leases have keys, and where to go on.
async fn scan(
    quorum: &Quorum,
    node: &Node,
    at: &Cursor,
    count: usize,
) -> Result<(u64, Vec<Resource>), LeaseError> {
    let begin = quorum.nodes.scripts().lease_key_prefix();
    let mut command = redis::cmd("SCAN");
    let command = &*command
        .arg(at.scan)
        .arg("MATCH")
        .arg(key_pattern(&begin))
        .arg("COUNT")
        .arg(count.clamp(1_000, 100_000));
    let scan = |mut connection| async move { command.query_async(&mut connection).await };
    let scanned: Result<(u64, Vec<Vec<u8>>), _> = node.server().run(scan).await;
    let (next, keys) = scanned.map_err(|error| node.server().unavailable(error))?;
    let resources = keys
        .into_iter()
        .filter_map(|key| resource_of_key(&begin, key));
    Ok((next, resources.collect()))
}
