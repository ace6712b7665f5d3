//! Replies of the nodes to one call, and the values on which a majority of the nodes agrees.

use std::{collections::HashMap, hash::Hash};

use tower_fence::lease::LeaseError;

use super::answer::{Answer, Counter, Taken};

/// Replies of the nodes to one call.
pub(crate) struct Answers {
    /// The number of nodes of the quorum.
    pub(crate) nodes: usize,
    /// The number of nodes that were asked.
    pub(crate) asked: usize,
    /// The replies, each with the index of its node.
    pub(crate) given: Vec<(usize, Answer)>,
    errors: Vec<LeaseError>,
}

impl Answers {
    pub(crate) const fn new(nodes: usize) -> Self {
        Self {
            nodes,
            asked: 0,
            given: vec![],
            errors: vec![],
        }
    }

    /// Returns the smallest number of nodes that is more than half of all nodes.
    pub(crate) const fn majority(&self) -> usize {
        majority_of(self.nodes)
    }

    /// Returns the minimum number of replying nodes that must have a lease so that a majority has
    /// it, assuming that every node without a reply has it as well.
    pub(crate) fn needed(&self) -> usize {
        let silent = self.nodes - self.given.len();
        self.majority().saturating_sub(silent).max(1)
    }

    /// Returns the replies in a quorum of `nodes` nodes.
    #[cfg(test)]
    pub(crate) fn of(nodes: usize, given: Vec<Answer>) -> Self {
        Self {
            given: given.into_iter().enumerate().collect(),
            ..Self::new(nodes)
        }
    }

    pub(crate) fn add(&mut self, node: usize, answer: Result<Answer, LeaseError>) {
        match answer {
            Ok(answer) => self.given.push((node, answer)),
            Err(error) => self.errors.push(error),
        }
    }

    /// Returns the most frequent value in the replies, and the number of replies that contain it.
    pub(crate) fn most<T: Eq + Hash>(
        &self,
        of: impl Fn(&Answer) -> Option<T>,
    ) -> Option<(T, usize)> {
        let mut counts = HashMap::new();
        for value in self.given.iter().filter_map(|(_, answer)| of(answer)) {
            *counts.entry(value).or_insert(0) += 1;
        }
        counts.into_iter().max_by_key(|(_, count)| *count)
    }

    /// Returns the value that is the same in the replies of a majority of all nodes.
    pub(crate) fn agreed<T: Eq + Hash>(&self, of: impl Fn(&Answer) -> Option<T>) -> Option<T> {
        let (value, count) = self.most(of)?;
        (count >= self.majority()).then_some(value)
    }

    /// Returns the count that a majority of all nodes has reached, given the counters in these
    /// replies. A token with a count that only a minority has reached was never granted, and the
    /// next call may not reach the nodes of that minority.
    pub(crate) fn counted(&self, counters: impl Iterator<Item = Counter>) -> Option<(i64, i64)> {
        let usable = counters.filter(|counter| counter.usable);
        let mut counted: Vec<_> = usable.map(Counter::counted).collect();
        counted.sort_unstable_by(|one, other| other.cmp(one));
        counted.get(self.majority() - 1).copied()
    }

    /// Returns the reply of a node.
    pub(crate) fn of_node(&self, node: usize) -> Option<&Answer> {
        let mut given = self.given.iter();
        given.find_map(|(n, answer)| (*n == node).then_some(answer))
    }

    pub(crate) fn count(&self, is: impl Fn(&Answer) -> bool) -> usize {
        self.given.iter().filter(|(_, answer)| is(answer)).count()
    }

    /// Returns whether so many replies match `is` that all other nodes together, including those
    /// without a reply, are not a majority.
    pub(crate) fn prevents(&self, is: impl Fn(&Answer) -> bool) -> bool {
        self.nodes - self.count(is) < self.majority()
    }

    /// Returns whether a majority has replied.
    pub(crate) fn are_enough(&self) -> bool {
        self.given.len() >= self.majority()
    }

    /// Returns the keys that were taken, each with the index of its node.
    pub(crate) fn taken(&self) -> Vec<(usize, Taken)> {
        let taken = self.given.iter().filter_map(|(n, answer)| match answer {
            Answer::Taken(taken) => Some((*n, taken.clone())),
            _ => None,
        });
        taken.collect()
    }

    /// Returns the error for a missing majority. It is [`LeaseError::Misconfigured`] if the usable
    /// nodes are not a majority, and [`LeaseError::Unavailable`] otherwise.
    pub(crate) fn no_majority(self) -> LeaseError {
        let is_permanent = |error: &&LeaseError| matches!(error, LeaseError::Misconfigured(_));
        let permanent = self.errors.iter().filter(is_permanent).count();
        let is_permanent_failure = self.nodes - permanent < self.majority();
        let first = self.errors.iter().find(|error| is_permanent(error));
        let error = NoMajority {
            answered: self.given.len(),
            nodes: self.nodes,
            source: first.or(self.errors.first()).cloned(),
        };
        match is_permanent_failure {
            true => LeaseError::misconfigured(error),
            false => LeaseError::unavailable(error),
        }
    }
}

/// Returns the smallest number of nodes that is more than half of them.
pub(crate) const fn majority_of(nodes: usize) -> usize {
    nodes / 2 + 1
}

/// Error for a call to which too few nodes have replied, or on which they do not agree.
#[derive(Debug, thiserror::Error)]
#[error("no majority of the nodes agrees: {answered} of {nodes} nodes gave a usable answer")]
struct NoMajority {
    answered: usize,
    nodes: usize,
    #[source]
    source: Option<LeaseError>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_of_five_answers_decide_and_two_do_not() {
        let is_sealed = |answer: &Answer| matches!(answer, Answer::Sealed);
        let sealed = |answer: &Answer| is_sealed(answer).then_some(());
        for (sealed_on, refused_on) in [(3, 0), (3, 2), (5, 0), (2, 0), (2, 3), (0, 5)] {
            let given = [
                vec![Answer::Sealed; sealed_on],
                vec![Answer::Refused; refused_on],
            ];
            let answers = Answers::of(5, given.concat());
            assert_eq!(answers.agreed(sealed).is_some(), sealed_on >= 3);
            assert_eq!(answers.prevents(is_sealed), sealed_on >= 3);
            assert_eq!(answers.are_enough(), sealed_on + refused_on >= 3);
        }
    }

    #[test]
    fn counter_of_a_minority_is_ignored() {
        let counter = |usable, n| Counter {
            usable,
            epoch: 2,
            n,
        };
        let counted = |nodes, counters: &[Counter]| {
            let answers = Answers::new(nodes);
            answers.counted(counters.iter().copied())
        };
        let counters = [9, 3, 7, 5, 1].map(|n| counter(true, n));
        assert_eq!(counted(5, &counters), Some((2, 5)));
        assert_eq!(counted(5, &counters[..3]), Some((2, 3)));
        assert_eq!(counted(3, &counters[..3]), Some((2, 7)));
        assert_eq!(counted(5, &counters[..2]), None);
        let blank = [counter(true, 9), counter(true, 3), counter(false, 7)];
        assert_eq!(counted(3, &blank), Some((2, 3)));
        assert_eq!(counted(5, &blank), None);
    }
}
