//! What an attempt leaves on the nodes, and taking it back.

use std::sync::Arc;

use super::{attempt::Attempt, shared::Quorum};
use crate::{
    lease::stored_id::StoredId,
    token::{Resource, Token},
};

/// What the last attempt may have left on the nodes.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Left {
    attempt: Option<Attempt>,
    token: Option<Token>,
}

impl Left {
    /// An attempt sets keys from now on.
    pub(super) fn begins(&mut self, attempt: Attempt) {
        self.attempt = Some(attempt);
    }

    /// And stores this token with them.
    pub(super) fn chooses(&mut self, token: Token) {
        self.token = Some(token);
    }

    /// It has set no key.
    pub(super) fn sets_nothing(&mut self) {
        *self = Self::default();
    }
}

/// A request for a lease that is under way. Dropped before it is [finished](Self::finish), it takes back what it has
/// left on the nodes.
pub(super) struct Pending {
    quorum: Arc<Quorum>,
    resource: Resource,
    id: StoredId,
    pub(super) left: Left,
}

impl Pending {
    pub(super) fn new(quorum: &Arc<Quorum>, resource: &Resource, id: StoredId) -> Self {
        Self {
            quorum: Arc::clone(quorum),
            resource: resource.clone(),
            id,
            left: Left::default(),
        }
    }

    /// Takes back what was left, so that others can have it, and waits for that.
    pub(super) async fn clean_up(&mut self) {
        let left = self.left;
        clean_up(&self.quorum, &self.resource, &self.id, left).await;
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
        let left = self.left;
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(async move { clean_up(&quorum, &resource, &id, left).await });
        }
    }
}

async fn clean_up(quorum: &Quorum, resource: &Resource, id: &StoredId, left: Left) {
    let Some(attempt) = left.attempt else {
        return;
    };
    let nodes = &quorum.nodes;
    let abandon = |_| Some(nodes.scripts().abandon(resource, id, attempt, left.token));
    // What is not reached ends by its time.
    let _ = nodes.ask("", abandon).await;
}
