//! What an attempt leaves on the nodes, and taking it back.

use std::sync::Arc;

use super::{attempt::Attempt, shared::Quorum};
use crate::{
    lease::{background::Background, stored_id::StoredId},
    token::{Resource, Token},
};

/// What the last attempt may have left on the nodes.
#[derive(Clone, Debug, Default)]
pub(super) struct Left {
    attempt: Option<Attempt>,
    sealed: Option<Sealed>,
}

/// A token, and the nodes that are asked to store it.
#[derive(Clone, Debug)]
struct Sealed {
    token: Token,
    nodes: Vec<usize>,
}

impl Left {
    /// An attempt sets keys from now on.
    pub(super) fn begins(&mut self, attempt: Attempt) {
        *self = Self {
            attempt: Some(attempt),
            sealed: None,
        };
    }

    /// And stores this token with them on these nodes, which had a lower one of the lease, or none.
    pub(super) fn seals(&mut self, token: Token, nodes: impl Iterator<Item = usize>) {
        self.sealed = Some(Sealed {
            token,
            nodes: nodes.collect(),
        });
    }

    /// It has set no key.
    pub(super) fn sets_nothing(&mut self) {
        *self = Self::default();
    }

    /// The token that the attempt itself may have stored on a node. Elsewhere its key may have the same one from an
    /// earlier attempt, which was granted.
    fn token_on(&self, node: usize) -> Option<Token> {
        let sealed = self.sealed.as_ref()?;
        sealed.nodes.contains(&node).then_some(sealed.token)
    }
}

/// A request for a lease that is under way. Dropped before it is [finished](Self::finish), it takes back what it has
/// left on the nodes.
pub(super) struct Pending {
    quorum: Arc<Quorum>,
    resource: Resource,
    id: StoredId,
    pub(super) left: Left,
    background: Background,
}

impl Pending {
    pub(super) fn new(quorum: &Arc<Quorum>, resource: &Resource, id: StoredId) -> Self {
        Self {
            quorum: Arc::clone(quorum),
            resource: resource.clone(),
            id,
            left: Left::default(),
            background: Background::here(),
        }
    }

    /// Takes back what was left, so that others can have it, and waits for that.
    pub(super) async fn clean_up(&mut self) {
        clean_up(&self.quorum, &self.resource, &self.id, &self.left).await;
        self.left = Left::default();
    }

    /// Ends the request: what it has left is in use, or may be asked for again.
    pub(super) fn finish(mut self) {
        self.left = Left::default();
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        if self.left.attempt.is_none() {
            return;
        }
        let (quorum, resource, id) = (
            Arc::clone(&self.quorum),
            self.resource.clone(),
            self.id.clone(),
        );
        let left = std::mem::take(&mut self.left);
        let clean_up = async move { clean_up(&quorum, &resource, &id, &left).await };
        self.background.spawn(clean_up);
    }
}

async fn clean_up(quorum: &Quorum, resource: &Resource, id: &StoredId, left: &Left) {
    let Some(attempt) = left.attempt else {
        return;
    };
    let nodes = &quorum.nodes;
    let scripts = nodes.scripts();
    let abandon = |node| Some(scripts.abandon(resource, id, attempt, left.token_on(node)));
    // What is not reached ends by its time.
    let _ = nodes.ask("", abandon).await;
}
