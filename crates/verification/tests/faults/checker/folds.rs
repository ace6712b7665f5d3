//! The log of a resource is in the order of the tokens, and the state of the resource is the fold
//! of its log. A read with a token returns the fold of the writes with this token or lower tokens.

use super::{Kinds, Resource, Verdict};
use crate::history::{Answer, History, Kind, Line, Moment, Operation, State};

pub fn check(history: &History, resources: &[Resource<'_>], verdict: &mut Verdict) {
    for (n, Resource { folds, reads, .. }) in resources.iter().enumerate() {
        let (state, Folds { log, writes, .. }) = (&history.states[n], folds);
        for pair in log.windows(2) {
            if pair[0].token > pair[1].token {
                verdict.violated(Kinds::Disorder, || format!("{pair:?}"));
            }
        }
        let is_counted = |(n, line): (usize, &Line)| usize::try_from(line.position) == Ok(n + 1);
        if folds.states.last() != Some(state) || !log.iter().enumerate().all(is_counted) {
            let done = writes.iter().flatten();
            let done = done.filter(|write| write.answer == Answer::Done).count();
            verdict.lost += done.saturating_sub(usize::try_from(state.count).unwrap_or(0));
            verdict.violated(Kinds::Overwritten, || {
                let (written, last) = (log.len(), folds.states.last());
                format!("{n}: {written} writes, {state:?}, not {last:?}")
            });
        }
        let is_lost = |read: &Operation| history.failovers.iter().any(|one| one.concerns(read));
        let (lost, reads): (Vec<_>, Vec<_>) =
            reads.iter().copied().partition(|(read, _)| is_lost(read));
        verdict.unchecked += lost.len();
        for &(read, seen) in &reads {
            folds.judge(read, seen, verdict);
        }
        one_after_the_other(&reads, verdict);
    }
    for &(first, last, sum) in &history.sums {
        let balances = history.states[first..last]
            .iter()
            .map(|state| state.balance);
        let balances: i64 = balances.sum();
        if balances != sum {
            verdict.violated(Kinds::Sum, || {
                format!("{first}..{last}: {balances}, not {sum}")
            });
        }
    }
}

/// The states of a resource after each of its writes, and the possible times of these states.
pub(super) struct Folds<'a> {
    pub(super) log: &'a [Line],
    /// The operation that has written each line.
    pub(super) writes: Vec<Option<&'a Operation>>,
    /// At index `n`, the state after `n` writes.
    pub(super) states: Vec<State>,
    /// At index `n`, the earliest moment at which all of the first `n` writes had been sent.
    invoked: Vec<Moment>,
    /// At index `n`, the earliest moment at which any write after the first `n` was done.
    done: Vec<Moment>,
}

impl<'a> Folds<'a> {
    pub(super) fn of(log: &'a [Line], writes: Vec<Option<&'a Operation>>) -> Self {
        let (mut state, mut invoked, mut done) = (State::default(), 0, Moment::MAX);
        let mut folds = Self {
            log,
            writes,
            states: vec![state],
            invoked: vec![invoked],
            done: vec![done],
        };
        for (line, write) in log.iter().zip(&folds.writes) {
            let written = write.and_then(Operation::written);
            state = state.with(line.entry, written.map_or(0, |(_, amount)| amount));
            invoked = invoked.max(write.map_or(0, |write| write.invoked));
            folds.states.push(state);
            folds.invoked.push(invoked);
        }
        for write in folds.writes.iter().rev() {
            done = done.min(write.map_or(Moment::MAX, Operation::done));
            folds.done.push(done);
        }
        folds.done.reverse();
        folds
    }

    /// Judges the state that a read returned.
    fn judge(&self, read: &Operation, seen: State, verdict: &mut Verdict) {
        let what = || format!("{read:?}");
        let count = usize::try_from(seen.count).unwrap_or(usize::MAX);
        if self.states.get(count) != Some(&seen) {
            return verdict.violated(Kinds::Invented, what);
        }
        if self.invoked[count] > read.answered {
            verdict.violated(Kinds::Future, what);
        }
        let missed = |line: &Line| line.token < read.token;
        if self.done[count] < read.invoked || self.log.get(count).is_some_and(missed) {
            verdict.violated(Kinds::Missed, what);
        }
        verdict.overtaken += usize::from(self.overtake(read, count));
    }

    /// Whether the last write in the state that a read returned supersedes the token of the read.
    /// `count` is the number of writes in that state.
    pub(super) fn overtake(&self, read: &Operation, count: usize) -> bool {
        let supersedes = |n: usize| match self.writes[n].map(|write| write.kind) {
            Some(Kind::Rewrite { .. }) => self.log[n].token > read.token,
            _ => self.log[n].token >= read.token,
        };
        count.checked_sub(1).is_some_and(supersedes)
    }
}

/// Checks that no read returns an older state than a read that was answered before this read was
/// sent.
fn one_after_the_other(reads: &[(&Operation, State)], verdict: &mut Verdict) {
    let mut answered: Vec<_> = reads.iter().collect();
    answered.sort_by_key(|(read, _)| read.answered);
    let mut answered = answered.into_iter().peekable();
    let mut least = 0;
    // `reads` are in the order in which they were sent.
    for (read, seen) in reads {
        while let Some((_, seen)) = answered.next_if(|(one, _)| one.answered < read.invoked) {
            least = least.max(seen.count);
        }
        if seen.count < least {
            verdict.violated(Kinds::Missed, || format!("less than {least}: {read:?}"));
        }
    }
}
