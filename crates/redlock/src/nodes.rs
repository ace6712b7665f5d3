//! Nodes of a quorum, and calls to all of them.

use std::{
    collections::HashSet,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    time::Duration,
};

use futures_util::{StreamExt, future::join_all, stream::FuturesUnordered};
use redis::Client;
use tower_fence::lease::LeaseError;

use super::{
    answer::{Answer, Taken},
    answers::{Answers, majority_of},
    node::Node,
    scripts::{Call, Scripts},
};

/// Reason why a node cannot be used if two nodes are the same server.
const TWIN: &str = "another node is the same server";

/// Nodes of a quorum.
pub(crate) struct Nodes {
    pub(crate) all: Box<[Arc<Node>]>,
    pub(crate) scripts: Scripts,
    /// Whether a majority of the nodes has accepted this issuer, and has not refused it since.
    is_admitted: AtomicBool,
}

impl Nodes {
    pub(crate) fn new(clients: Vec<Client>, timeout: Duration, key_prefix: &str) -> Self {
        let nodes = clients.into_iter();
        let nodes: Box<[_]> = nodes
            .map(|client| Arc::new(Node::new(client, timeout, key_prefix)))
            .collect();
        let mut names: Vec<_> = nodes.iter().map(|node| node.name()).collect();
        names.sort_unstable();
        let scripts = Scripts {
            key_prefix: key_prefix.into(),
            nodes: names.join(" ").into(),
        };
        Self {
            all: nodes,
            scripts,
            is_admitted: AtomicBool::new(false),
        }
    }

    /// Returns whether two nodes have the same name.
    pub(crate) fn has_repeated_name(&self) -> bool {
        let names: HashSet<_> = self.all.iter().map(|node| node.name()).collect();
        names.len() < self.all.len()
    }

    /// Checks all nodes that reply.
    ///
    /// # Errors
    ///
    /// Returns [`LeaseError::Misconfigured`] if a server that replies cannot be a node, and
    /// [`LeaseError::Unavailable`] if no majority replies.
    pub(crate) async fn check(&self) -> Result<(), LeaseError> {
        let checks = self.all.iter();
        let checks = checks.map(|node| self.ask_node(node, "", self.scripts.check("")));
        let mut answers = Answers::new(self.all.len());
        for (n, checked) in join_all(checks).await.into_iter().enumerate() {
            match checked {
                Ok(Answer::OtherNodes(theirs)) => return Err(self.other_nodes(n, theirs)),
                Err(error @ LeaseError::Misconfigured(_)) => return Err(error),
                checked => answers.add(n, checked),
            }
        }
        match answers.are_enough() {
            true => Ok(()),
            false => Err(answers.no_majority()),
        }
    }

    /// Checks each node, and whether it accepts writes. Returns the failures of the nodes that
    /// reply, and the number of nodes that do not reply.
    pub(crate) async fn failures(&self) -> (Vec<LeaseError>, usize) {
        let checks = self.all.iter();
        let checks = checks.map(async |node| node.check(&self.scripts.check("")).await);
        // After these checks, each node is compared with all others.
        let _ = join_all(checks).await;
        let writes = self.all.iter();
        let writes = writes.map(|node| self.ask_node(node, "", self.scripts.write()));
        let written = join_all(writes).await.into_iter().enumerate();
        let (mut failures, mut silent) = (vec![], 0);
        for (n, written) in written {
            match written {
                Ok(Answer::OtherNodes(theirs)) => failures.push(self.other_nodes(n, theirs)),
                Err(_) if self.all[n].is_late() => silent += 1,
                Err(error) => failures.push(error),
                Ok(_) => {}
            }
        }
        (failures, silent)
    }

    /// Returns the smallest number of nodes that is more than half of all nodes.
    pub(crate) fn majority(&self) -> usize {
        majority_of(self.all.len())
    }

    /// Before the first grant, and again after a refusal, checks whether a majority of the nodes
    /// accepts this issuer. A node without counters belongs to the issuer that writes its first
    /// counter. Without this check, an issuer that all other nodes refuse would become the owner of
    /// a node that has lost its data.
    pub(crate) async fn admit(&self, source: &str) -> Result<(), LeaseError> {
        if self.is_admitted.load(SeqCst) {
            return Ok(());
        }
        let check = |n: usize| {
            let node = &self.all[n];
            Some(async move { node.check(&self.scripts.check(source)).await })
        };
        let answers = self.ask_each(source, check).await?;
        if !answers.are_enough() {
            return Err(answers.no_majority());
        }
        self.is_admitted.store(true, SeqCst);
        Ok(())
    }

    /// Records that a node has refused this issuer. The next grant checks the nodes again.
    pub(crate) fn note_refusal(&self) {
        self.is_admitted.store(false, SeqCst);
    }

    /// Sends each node its call, and waits until every node has replied or timed out. If some nodes
    /// did not reply to their last calls, and the other nodes are a majority, the former are
    /// skipped, and are probed in the background.
    pub(crate) async fn ask(
        &self,
        source: &str,
        call: impl Fn(usize) -> Option<Call>,
    ) -> Result<Answers, LeaseError> {
        let ask = |n: usize| {
            let (node, call) = (&self.all[n], call(n)?);
            Some(async move { self.ask_node(node, source, call).await })
        };
        self.ask_each(source, ask).await
    }

    /// Like [`ask`](Self::ask), for any requests. The parameter `ask` returns the request for a
    /// node, or `None` if the node gets none.
    async fn ask_each<F>(
        &self,
        source: &str,
        ask: impl Fn(usize) -> Option<F>,
    ) -> Result<Answers, LeaseError>
    where
        F: Future<Output = Result<Answer, LeaseError>>,
    {
        let late = self.all.iter().filter(|node| node.is_late()).count();
        let skips_late = self.all.len() - late >= self.majority();
        let mut asked = FuturesUnordered::new();
        for (n, node) in self.all.iter().enumerate() {
            if skips_late && node.is_late() {
                node.probe(self.scripts.check(source));
                continue;
            }
            if let Some(answer) = ask(n) {
                asked.push(async move {
                    let answer = answer.await;
                    node.note(&answer, || self.scripts.check(source));
                    (n, answer)
                });
            }
        }
        let mut answers = Answers::new(self.all.len());
        answers.asked = asked.len();
        while let Some((n, answer)) = asked.next().await {
            match answer {
                Ok(Answer::OtherNodes(theirs)) => return Err(self.other_nodes(n, theirs)),
                answer => answers.add(n, answer),
            }
        }
        Ok(answers)
    }

    /// Sends one node a call. If the node has never been checked, it is checked first.
    async fn ask_node(&self, node: &Node, source: &str, call: Call) -> Result<Answer, LeaseError> {
        match self.check_fitness(node, source).await? {
            Some(other_nodes) => Ok(other_nodes),
            None => node.run(&call).await,
        }
    }

    /// Checks a node that has never been checked. If another node is the same server, checks both
    /// again, because an address may have changed. Returns [`Answer::OtherNodes`] if the counters
    /// of the node belong to a quorum of other nodes.
    async fn check_fitness(&self, node: &Node, source: &str) -> Result<Option<Answer>, LeaseError> {
        let check = || self.scripts.check(source);
        loop {
            if node.run_id().is_none()
                && let other @ Answer::OtherNodes(_) = node.check(&check()).await?
            {
                return Ok(Some(other));
            }
            // Each run id stays known until a check has ended. If the run ids were cleared first, a
            // concurrent request could find only one node with this run id, and use it.
            for twin in self.twins_of(node) {
                if twin.may_check_again() {
                    twin.server.disconnect();
                    if !matches!(twin.check(&check()).await, Ok(Answer::Node { .. })) {
                        // The address may have changed. The twin is checked before its next use.
                        twin.forget_run_id();
                    }
                }
            }
            match (node.run_id(), self.twins_of(node).is_empty()) {
                (None, _) => {}
                (Some(_), true) => return Ok(None),
                (Some(_), false) => return Err(node.unfit(TWIN)),
            }
        }
    }

    /// Returns the nodes with the run id of this node, including the node itself, if there are
    /// several.
    fn twins_of(&self, node: &Node) -> Vec<&Arc<Node>> {
        let run_id = node.run_id();
        let same = |other: &&Arc<Node>| other.run_id() == run_id;
        let twins: Vec<_> = self.all.iter().filter(same).collect();
        match twins.len() {
            1 => vec![],
            _ => twins,
        }
    }

    /// Checks that no two nodes have replied with the same replication id. Two names may resolve to
    /// the same server if an address has changed since the nodes were checked. In this case, drops
    /// the connections to that server, because the address may have been corrected.
    pub(crate) fn check_twins(&self, taken: &[(usize, Taken)]) -> Result<(), LeaseError> {
        let mut histories = HashSet::new();
        let twin = taken
            .iter()
            .find(|(_, taken)| !histories.insert(&taken.stamp.history));
        let Some((n, twin)) = twin else {
            return Ok(());
        };
        for (same, taken) in taken {
            if taken.stamp.history == twin.stamp.history {
                self.all[*same].server.disconnect();
            }
        }
        Err(self.all[*n].unfit(TWIN))
    }

    /// Returns the error for a node whose counters belong to a quorum of other nodes. The step
    /// fails even if the remaining nodes are a majority. Otherwise issuers with a changed set of
    /// nodes could grant leases concurrently with issuers of the earlier set. If only the source of
    /// epochs differs, the majorities of both issuers have a node in common, so the node fails
    /// alone.
    fn other_nodes(&self, node: usize, theirs: String) -> LeaseError {
        LeaseError::misconfigured(OtherNodes {
            node: self.all[node].name().into(),
            key_prefix: self.scripts.key_prefix.clone(),
            ours: self.scripts.nodes.clone(),
            theirs,
        })
    }
}

/// Error for a node whose counters belong to a quorum of other nodes. The name of a node consists
/// of host, port and database.
#[derive(Debug, thiserror::Error)]
#[error(
    "the token counters under the key prefix `{key_prefix}` on the node `{node}` belong to a quorum of the nodes \
     `{theirs}`, but this issuer's nodes are `{ours}`: to change the nodes, stop all issuers, delete the keys \
     `{key_prefix}:quorum:*` on all old and new nodes, and start the issuers with the new ones; if only this node was \
     used by another quorum, which no longer uses it, delete the keys on this node; if an issuer was started with the \
     nodes `{theirs}` by mistake, stop it and delete only the counters `{key_prefix}:quorum:*:counter` that name them"
)]
struct OtherNodes {
    node: Box<str>,
    key_prefix: Box<str>,
    ours: Box<str>,
    theirs: String,
}
