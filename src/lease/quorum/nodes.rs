//! The nodes together: asking all of them, and what a majority of them says.

use std::{
    collections::{HashMap, HashSet},
    hash::Hash,
    sync::Arc,
    time::Duration,
};

use futures_util::{StreamExt, future::join_all, stream::FuturesUnordered};
use redis::RedisError;

use super::{
    answer::{Answer, Clock, Taken, Unfit},
    node::{Node, is_unfit},
    scripts::{Call, Scripts},
};
use crate::lease::{LeaseError, redis::Credentials};

const TWIN: &str = "another node is the same server";

pub(super) struct Nodes {
    nodes: Box<[Arc<Node>]>,
    scripts: Scripts,
}

impl Nodes {
    /// # Errors
    ///
    /// [`LeaseError::Unavailable`] when a URL is not one: it says which.
    pub(super) fn new(
        urls: &[&str],
        credentials: &Credentials,
        wait: Duration,
        key_prefix: &str,
    ) -> Result<Self, LeaseError> {
        let nodes = urls.iter().zip(1..).map(|(url, place)| {
            let node = Node::new(url, credentials, wait).map(Arc::new);
            node.map_err(|source| {
                let nodes = urls.len();
                LeaseError::misconfigured(NoUrl {
                    place,
                    nodes,
                    source,
                })
            })
        });
        let nodes: Box<[_]> = nodes.collect::<Result<_, LeaseError>>()?;
        let mut names: Vec<_> = nodes.iter().map(|node| node.name()).collect();
        names.sort_unstable();
        Ok(Self {
            nodes,
            scripts: Scripts::new(key_prefix, &names.join(" ")),
        })
    }

    /// Whether two of them have the same name.
    pub(super) fn has_twins(&self) -> bool {
        let names: HashSet<_> = self.nodes.iter().map(|node| node.name()).collect();
        names.len() < self.nodes.len()
    }

    /// Checks all nodes that answer.
    ///
    /// # Errors
    ///
    /// [`LeaseError::Unavailable`] when one of them cannot be a node, or no majority answers.
    pub(super) async fn check(&self) -> Result<(), LeaseError> {
        let checks = self.nodes.iter();
        let checks = checks.map(async |node| self.ask_node(node, "", self.scripts.check("")).await);
        let mut answers = Answers::new(self.nodes.len());
        for (n, checked) in join_all(checks).await.into_iter().enumerate() {
            match checked {
                Ok(Answer::Unfit(unfit)) => return Err(self.other_owner(n, unfit)),
                Ok(answer) => answers.given.push((n, answer)),
                Err(error) if is_unfit(&error) => return Err(error),
                Err(error) => answers.first_error = Some(error),
            }
        }
        match answers.are_enough() {
            true => Ok(()),
            false => Err(answers.no_majority()),
        }
    }

    pub(super) const fn scripts(&self) -> &Scripts {
        &self.scripts
    }

    pub(super) fn all(&self) -> &[Arc<Node>] {
        &self.nodes
    }

    /// More than half of them.
    pub(super) fn majority(&self) -> usize {
        self.nodes.len() / 2 + 1
    }

    /// How far a majority of all nodes has counted. What only a minority has counted was never granted, and may be out
    /// of reach the next time.
    pub(super) fn counted(&self, clocks: impl Iterator<Item = Clock>) -> Option<(i64, i64)> {
        let usable = clocks.filter(|clock| clock.usable).map(Clock::counted);
        let mut counted: Vec<_> = usable.collect();
        counted.sort_unstable_by(|one, other| other.cmp(one));
        counted.get(self.majority() - 1).copied()
    }

    /// Sends each node its call, and waits until all have answered, each for its time at most. Who did not answer the
    /// last time is left out, where the others are a majority, and asked in the background whether it answers again.
    pub(super) async fn ask(
        &self,
        source: &str,
        call: impl Fn(usize) -> Option<Call>,
    ) -> Result<Answers, LeaseError> {
        let late = self.nodes.iter().filter(|node| node.is_late()).count();
        let leaves_out = self.nodes.len() - late >= self.majority();
        let mut asked = FuturesUnordered::new();
        for (n, node) in self.nodes.iter().enumerate() {
            if leaves_out && node.is_late() {
                node.probe(self.scripts.check(source));
                continue;
            }
            if let Some(call) = call(n) {
                asked.push(async move { (n, self.ask_node(node, source, call).await) });
            }
        }
        let mut answers = Answers::new(self.nodes.len());
        answers.asked = asked.len();
        while let Some((n, answer)) = asked.next().await {
            match answer {
                Ok(Answer::Unfit(unfit)) => return Err(self.other_owner(n, unfit)),
                Ok(answer) => answers.given.push((n, answer)),
                Err(error) => answers.first_error = answers.first_error.or(Some(error)),
            }
        }
        Ok(answers)
    }

    /// Sends one node a call, which is checked before where it never was.
    pub(super) async fn ask_node(
        &self,
        node: &Node,
        source: &str,
        call: Call,
    ) -> Result<Answer, LeaseError> {
        if node.run_id().is_none()
            && let unfit @ Answer::Unfit(_) = node.check(self.scripts.check(source)).await?
        {
            return Ok(unfit);
        }
        let same = |other: &&Arc<Node>| other.run_id() == node.run_id();
        if self.nodes.iter().filter(same).count() > 1 {
            return Err(node.unfit(TWIN));
        }
        node.run(call).await
    }

    /// Makes sure that no two nodes have answered with one history: a name that leads to another server since it was
    /// checked.
    pub(super) fn check_twins(&self, taken: &[(usize, Taken)]) -> Result<(), LeaseError> {
        let mut histories = HashSet::new();
        let twin = taken
            .iter()
            .find(|(_, taken)| !histories.insert(&taken.stamp.history));
        twin.map_or(Ok(()), |(n, _)| Err(self.nodes[*n].unfit(TWIN)))
    }

    /// The clocks of a node belong to another application, or to other nodes. A majority without it would not do: that
    /// would let a changed set of nodes go on beside the one of before.
    fn other_owner(&self, node: usize, unfit: Unfit) -> LeaseError {
        let key_prefix = self.scripts.key_prefix().into();
        let node = self.nodes[node].name().into();
        match unfit {
            Unfit::OtherNodes(theirs) => LeaseError::misconfigured(OtherOwner::Nodes {
                node,
                key_prefix,
                ours: self.scripts.nodes().into(),
                theirs,
            }),
            Unfit::OtherSource(theirs) => LeaseError::misconfigured(OtherOwner::Source {
                node,
                key_prefix,
                theirs,
            }),
            // A node says so itself.
            Unfit::NoHistory | Unfit::Replicated => crate::lease::redis::unexpected(),
        }
    }
}

/// What the nodes have answered.
pub(super) struct Answers {
    nodes: usize,
    asked: usize,
    pub(super) given: Vec<(usize, Answer)>,
    first_error: Option<LeaseError>,
}

impl Answers {
    const fn new(nodes: usize) -> Self {
        Self {
            nodes,
            asked: 0,
            given: vec![],
            first_error: None,
        }
    }

    /// What so many nodes have answered, all of which were asked.
    #[cfg(test)]
    pub(super) fn of(nodes: usize, given: Vec<Answer>) -> Self {
        Self {
            asked: nodes,
            given: given.into_iter().enumerate().collect(),
            ..Self::new(nodes)
        }
    }

    /// What is the same at a majority of all nodes.
    pub(super) fn majority<T: Eq + Hash>(&self, of: impl Fn(&Answer) -> Option<T>) -> Option<T> {
        let mut counts = HashMap::new();
        for value in self.given.iter().filter_map(|(_, answer)| of(answer)) {
            *counts.entry(value).or_insert(0) += 1;
        }
        let most = counts.into_iter().max_by_key(|(_, count)| *count)?;
        (most.1 > self.nodes / 2).then_some(most.0)
    }

    pub(super) fn count(&self, is: impl Fn(&Answer) -> bool) -> usize {
        self.given.iter().filter(|(_, answer)| is(answer)).count()
    }

    /// Whether nodes of which this is true keep the others from being a majority, whatever those say that did not
    /// answer.
    pub(super) fn prevents(&self, is: impl Fn(&Answer) -> bool) -> bool {
        self.nodes - self.count(is) <= self.nodes / 2
    }

    /// Whether all who were asked have answered so.
    pub(super) fn are_all(&self, is: impl Fn(&Answer) -> bool) -> bool {
        self.count(is) == self.asked
    }

    /// Whether a majority has answered.
    pub(super) fn are_enough(&self) -> bool {
        self.given.len() > self.nodes / 2
    }

    /// The error where there is no majority.
    pub(super) fn no_majority(self) -> LeaseError {
        let answered = self.given.len();
        let nodes = self.nodes;
        LeaseError::unavailable(NoMajority {
            answered,
            nodes,
            source: self.first_error,
        })
    }
}

/// What was named is no URL of a node. Nothing of it is repeated: it may have a password in it.
#[derive(Debug, thiserror::Error)]
#[error("node {place} of {nodes} is not named by a URL of Redis")]
struct NoUrl {
    place: usize,
    nodes: usize,
    source: RedisError,
}

/// Too few nodes have answered, or they do not agree.
#[derive(Debug, thiserror::Error)]
#[error("{answered} of {nodes} nodes have answered, and there is no majority that agrees")]
struct NoMajority {
    answered: usize,
    nodes: usize,
    #[source]
    source: Option<LeaseError>,
}

/// Whose the clocks of a node are. Nodes are named by host, port and database.
#[derive(Debug, thiserror::Error)]
enum OtherOwner {
    #[error(
        "the clocks under the key prefix `{key_prefix}` on the node `{node}` belong to a quorum of the nodes `{theirs}`, \
         and this issuer's are `{ours}`: if the nodes are to be changed, stop all issuers, delete the keys \
         `{key_prefix}:quorum:*` on all old and new nodes, and start the issuers with the new ones; if it is this node \
         alone that another quorum has used, and uses no more, delete the keys there"
    )]
    Nodes {
        node: Box<str>,
        key_prefix: Box<str>,
        ours: Box<str>,
        theirs: String,
    },
    #[error(
        "the clocks under the key prefix `{key_prefix}` on the node `{node}` belong to the source of epochs `{theirs}`, \
         which is not this issuer's: choose a key prefix for each database (`key_prefix`), or, where the database was \
         made anew, stop all issuers and delete the keys `{key_prefix}:quorum:*` on all nodes"
    )]
    Source {
        node: Box<str>,
        key_prefix: Box<str>,
        theirs: String,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nodes(count: usize) -> Nodes {
        let urls: Vec<_> = (1..=count)
            .map(|n| format!("redis://127.0.0.{n}"))
            .collect();
        let urls: Vec<_> = urls.iter().map(String::as_str).collect();
        Nodes::new(
            &urls,
            &Credentials::default(),
            Duration::from_secs(1),
            "tower-fence",
        )
        .unwrap()
    }

    #[test]
    fn a_majority_is_more_than_half() {
        for (count, majority) in [(1, 1), (2, 2), (3, 2), (4, 3), (5, 3), (7, 4)] {
            assert_eq!(nodes(count).majority(), majority, "of {count}");
        }
    }

    #[test]
    fn what_a_minority_has_counted_counts_for_nothing() {
        let clock = |usable, n| Clock {
            usable,
            epoch: 2,
            n,
        };
        let counted = |count, clocks: &[Clock]| nodes(count).counted(clocks.iter().copied());
        let clocks = [9, 3, 7, 5, 1].map(|n| clock(true, n));
        assert_eq!(counted(5, &clocks), Some((2, 5)));
        assert_eq!(counted(5, &clocks[..3]), Some((2, 3)));
        assert_eq!(counted(3, &clocks[..3]), Some((2, 7)));
        assert_eq!(counted(5, &clocks[..2]), None);
        let blank = [clock(true, 9), clock(true, 3), clock(false, 7)];
        assert_eq!(counted(3, &blank), Some((2, 3)));
        assert_eq!(counted(5, &blank), None);
    }

    #[test]
    fn three_of_five_answers_decide_and_two_do_not() {
        let answers = |sealed, refused| {
            let sealed = (0..sealed).map(|n| (n, Answer::Sealed));
            let mut answers = Answers::new(5);
            answers.given = sealed
                .chain((0..refused).map(|n| (9 - n, Answer::Refused)))
                .collect();
            answers.asked = answers.given.len();
            answers
        };
        let is_sealed = |answer: &Answer| matches!(answer, Answer::Sealed);
        let sealed = |answer: &Answer| is_sealed(answer).then_some(());
        for (given, refused) in [(3, 0), (3, 2), (5, 0)] {
            let answers = answers(given, refused);
            assert!(answers.majority(sealed).is_some() && answers.prevents(is_sealed));
            assert!(answers.are_enough());
            assert_eq!(answers.are_all(is_sealed), refused == 0);
        }
        for (given, refused) in [(2, 0), (2, 3), (0, 5)] {
            let answers = answers(given, refused);
            assert!(answers.majority(sealed).is_none() && !answers.prevents(is_sealed));
            assert_eq!(answers.are_enough(), refused >= 3);
            assert_eq!(answers.are_all(is_sealed), refused == 0);
        }
    }
}
