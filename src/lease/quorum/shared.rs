//! What all calls share: the nodes and the memory, and looking for a lease and ending it wherever it is.

use std::{collections::HashMap, sync::Arc, time::Duration};

use super::{
    answer::{Answer, Found},
    nodes::{Answers, Nodes},
};
use crate::{
    epochs::SourceId,
    lease::{Held, LeaseError, memory::Memory},
    token::Resource,
};

/// The nodes, and what this process remembers.
pub(super) struct Quorum {
    pub(super) nodes: Nodes,
    pub(super) memory: Arc<Memory>,
    /// How long a request may take that meets others on its way.
    pub(super) limit: Duration,
}

impl Quorum {
    pub(super) fn source(&self) -> &str {
        self.memory.source().map_or("", SourceId::as_str)
    }

    /// What each node has of a lease.
    pub(super) async fn look(&self, resource: &Resource) -> Result<Answers, LeaseError> {
        let look = |_| Some(self.nodes.scripts().look(resource));
        self.nodes.ask(self.source(), look).await
    }

    /// Ends on each node what was found there, if it is one of these.
    pub(super) async fn end(
        &self,
        resource: &Resource,
        looks: &Answers,
        is_one: impl Fn(&Found) -> bool,
    ) -> Result<Answers, LeaseError> {
        let end = |n: usize| {
            let found = looks.given.iter().find_map(|(node, answer)| match answer {
                Answer::Found(found) if *node == n && is_one(found) => Some(found),
                _ => None,
            });
            Some(self.nodes.scripts().end(resource, found?))
        };
        self.nodes.ask(self.source(), end).await
    }
}

/// The lease that a majority has, under the same id and with the same token.
pub(super) fn held_by_majority(looks: &Answers, majority: usize) -> Option<Held> {
    let mut held: HashMap<_, Vec<_>> = HashMap::new();
    for (_, answer) in &looks.given {
        if let Answer::Found(found) = answer
            && let (Some(token), Some(left)) = (found.token, found.left)
        {
            let same = held.entry((&found.id, token)).or_default();
            same.push((left, &found.owner));
        }
    }
    let ((_, token), mut nodes) = held
        .into_iter()
        .find(|(_, nodes)| nodes.len() >= majority)?;
    // When so many have let it go that it has no majority.
    nodes.sort_unstable_by_key(|(left, _)| std::cmp::Reverse(*left));
    let (ttl, owner) = nodes.get(majority - 1)?;
    Some(Held {
        token,
        owner: (*owner).clone(),
        ttl: *ttl,
        waiters: 0,
        granted_at: None,
    })
}
