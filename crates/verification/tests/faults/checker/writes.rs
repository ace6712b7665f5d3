//! An acknowledged write is in the log exactly once, a write with an unknown outcome at most once,
//! and a refused write not at all.

use std::collections::HashMap;

use super::{Kinds, Resource, Verdict, folds::Folds};
use crate::history::{Answer, Failover, History, Kind, Line, Operation};

pub fn check(history: &History, resources: &[Resource<'_>], verdict: &mut Verdict) {
    let mut parts = HashMap::<i64, u8>::new();
    for Resource {
        operations, folds, ..
    } in resources
    {
        let times = times(folds.log);
        lines(folds, &times, verdict);
        for operation in operations {
            let Some((entry, _)) = operation.written() else {
                continue;
            };
            let is_there = times.contains_key(&entry);
            if operation.parts > 1 && is_there {
                *parts.entry(entry).or_default() += 1;
            }
            if matches!(operation.answer, Answer::Refused | Answer::Undone) && is_there {
                verdict.violated(Kinds::Refused, || format!("{operation:?}"));
            }
            if operation.answer == Answer::Done && !is_there {
                missing(history, operation, folds, verdict);
            }
        }
    }
    for operation in &history.operations {
        let there = operation.written().and_then(|(entry, _)| parts.get(&entry));
        if there.is_some_and(|there| *there != operation.parts) {
            verdict.violated(Kinds::Torn, || format!("{operation:?}"));
        }
    }
}

fn times(log: &[Line]) -> HashMap<i64, usize> {
    let mut times = HashMap::with_capacity(log.len());
    for line in log {
        *times.entry(line.entry).or_default() += 1;
    }
    times
}

fn lines(folds: &Folds<'_>, times: &HashMap<i64, usize>, verdict: &mut Verdict) {
    let Folds { log, writes, .. } = folds;
    for (line, write) in log.iter().zip(writes) {
        if times[&line.entry] > 1 {
            verdict.violated(Kinds::Doubled, || format!("{line:?} {write:?}"));
        }
        if write.is_none_or(|write| write.token != line.token) {
            verdict.violated(Kinds::Foreign, || format!("{line:?} {write:?}"));
        }
    }
    for pair in log.windows(2).zip(writes.windows(2)) {
        let ([one, two], [_, Some(write)]) = pair else {
            continue;
        };
        if one.token == two.token && matches!(write.kind, Kind::Write { .. }) {
            verdict.violated(Kinds::Repeated, || format!("{one:?} {write:?}"));
        }
    }
}

/// Judges an acknowledged write that is missing. A failover may have lost this write, together with
/// all newer writes.
fn missing(history: &History, operation: &Operation, folds: &Folds<'_>, verdict: &mut Verdict) {
    let concerns = |failover: &&Failover| failover.concerns(operation);
    let mut crashed = history
        .failovers
        .iter()
        .filter(concerns)
        .map(|failover| failover.crashed);
    // If several failovers may have lost the write, it is unknown which failover did.
    let Some(first_crash) = crashed.next() else {
        verdict.lost += 1;
        return verdict.violated(Kinds::Lost, || format!("{operation:?}"));
    };
    verdict.failed_over += 1;
    let is_newer = |line: &Line, write: &Operation| {
        line.token > operation.token
            || line.token == operation.token && write.invoked > operation.answered
    };
    let newer = folds.log.iter().zip(&folds.writes).find(|(line, write)| {
        write.is_some_and(|write| is_newer(line, write) && write.done() <= first_crash)
    });
    if let Some((newer, _)) = newer {
        verdict.violated(Kinds::LostAlone, || format!("{operation:?}, not {newer:?}"));
    }
}
