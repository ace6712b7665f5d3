//! The possible steps, and their effects.

use super::{Attempt, Kept, Keys, Record, Request, Rule, State};

/// The token of the holder.
const TOKEN: u8 = 1;

/// The token of the newer holder.
const NEWER: u8 = 2;

/// The highest stale token after a failover.
pub const HIGHEST_STALE: u8 = 9;

#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub enum Step {
    Send(Request),
    /// The request claims the record, or gets the stored answer.
    Claim(Request),
    Admit(Request),
    Write(Request),
    Commit(Request),
    /// The COMMIT succeeds, and the answer is lost.
    CommitUnheard(Request),
    /// The connection is lost before COMMIT has arrived.
    CommitFails(Request),
    /// The record is committed, if it has a transaction of its own.
    Record(Request),
    /// The handler fails, and everything is rolled back. There is no older holder, so no raise is
    /// needed.
    Fail(Request),
    /// The client disconnects, and everything is rolled back.
    GoAway(Request),
    /// The newer holder writes.
    NewerWrites,
    /// The record expires.
    Expire,
    Crash,
    /// The standby stops replicating.
    FallBehind,
    /// The standby is promoted.
    FailOver,
    /// All tokens that the failover may have lost become stale.
    CatchUp,
}

impl Keys {
    pub(super) fn possible(&self, state: &State, steps: &mut Vec<Step>) {
        let row_is_free = !state.attempts.iter().any(|attempt| has_row(*attempt));
        let key_is_free = !self.rules.has(Rule::OneAtATime)
            || !state.attempts.iter().any(|attempt| has_key(*attempt));
        for (place, request) in Request::ALL.into_iter().enumerate() {
            let in_turn = match request {
                Request::First => true,
                Request::Mistake => state.attempts[0] != Attempt::None,
                _ => place < self.requests && state.attempts[place - 1] != Attempt::None,
            };
            match state.attempts[place] {
                Attempt::None if in_turn => steps.push(Step::Send(request)),
                Attempt::None | Attempt::Over => {}
                Attempt::Sent => {
                    if key_is_free {
                        steps.push(Step::Claim(request));
                    }
                }
                Attempt::Claimed => {
                    if row_is_free && !state.is_behind {
                        steps.push(Step::Admit(request));
                    }
                }
                Attempt::Admitted => {
                    steps.push(Step::Write(request));
                    steps.push(Step::GoAway(request));
                    if state.failures > 0 {
                        steps.push(Step::Fail(request));
                    }
                }
                Attempt::Written(_) => {
                    steps.push(Step::Commit(request));
                    steps.push(Step::CommitUnheard(request));
                    steps.push(Step::CommitFails(request));
                }
                Attempt::Unrecorded(_) => {
                    steps.push(Step::Record(request));
                    steps.push(Step::GoAway(request));
                }
            }
        }
        let is_alive = NEWER > state.max_token && !state.is_behind;
        if state.newer < self.newer && row_is_free && is_alive {
            steps.push(Step::NewerWrites);
        }
        // A failover must not restore a record that has expired.
        let may_expire = state.expiries < self.expiries && state.standby.is_none();
        if state.record.is_some() && may_expire {
            steps.push(Step::Expire);
        }
        let busy = state.attempts.iter().any(|attempt| has_key(*attempt));
        if state.crashes > 0 && busy {
            steps.push(Step::Crash);
        }
        if state.failovers > 0 {
            steps.push(match state.standby {
                None => Step::FallBehind,
                Some(_) => Step::FailOver,
            });
        }
        if state.is_behind {
            steps.push(Step::CatchUp);
        }
    }

    pub(super) fn take(&self, before: &State, step: Step) -> State {
        let mut state = before.clone();
        match step {
            Step::Send(request) => set(&mut state, request, Attempt::Sent),
            Step::Claim(request) => self.claim(&mut state, request),
            Step::Admit(request) => self.admit(&mut state, request),
            Step::Write(request) => {
                let answer = before.count() + 1;
                set(&mut state, request, Attempt::Written(answer));
            }
            Step::Commit(request) => {
                let answer = self.commit(&mut state, request);
                hear(&mut state, request, answer);
            }
            Step::CommitUnheard(request) => {
                self.commit(&mut state, request);
            }
            Step::Record(request) => {
                if let Attempt::Unrecorded(answer) = before.attempts[request as usize] {
                    record(&mut state, request, Some(answer));
                    set(&mut state, request, Attempt::Over);
                }
            }
            Step::Fail(request) => {
                state.failures -= 1;
                state.failed = true;
                set(&mut state, request, Attempt::Over);
                if !self.rules.has(Rule::FailureLeavesNone) {
                    record(&mut state, request, None);
                }
            }
            Step::GoAway(request) | Step::CommitFails(request) => {
                set(&mut state, request, Attempt::Over)
            }
            Step::NewerWrites => {
                state.newer += 1;
                state.max_token = highest_stale(before, NEWER);
            }
            Step::Expire => {
                state.expiries += 1;
                state.record = None;
                if !state.single_use {
                    // From now on, a repeated request writes again.
                    state.expired += state.written.iter().sum::<u8>();
                    state.written = [0; 2];
                    state.answers = [None; 2];
                }
            }
            Step::Crash => {
                state.crashes -= 1;
                end_transactions(&mut state);
            }
            Step::FallBehind => {
                state.standby = Some(Kept {
                    max_token: before.max_token,
                    record: before.record,
                    written: before.written,
                    expired: before.expired,
                    newer: before.newer,
                });
            }
            Step::FailOver => fail_over(&mut state),
            Step::CatchUp => {
                state.is_behind = false;
                state.max_token = HIGHEST_STALE;
            }
        }
        state
    }

    fn claim(&self, state: &mut State, request: Request) {
        // If the token is checked first, a stale token is refused without a lookup of the record.
        if !self.rules.has(Rule::RecordFirst) && TOKEN <= state.max_token {
            return refuse(state, request);
        }
        let Some(found) = state.record else {
            return set(state, request, Attempt::Claimed);
        };
        set(state, request, Attempt::Over);
        if found.body != request.body() && self.rules.has(Rule::SameRequest) {
            return;
        }
        match found.answer {
            Some(stored) => {
                state.replayed_when_stale |= TOKEN <= state.max_token;
                state.replayed_after_failover |= state.failovers < self.failovers;
                let stored = if self.rules.has(Rule::StoredAnswer) {
                    stored
                } else {
                    state.count()
                };
                hear(state, request, stored);
            }
            None => state.waits_for_ended = true,
        }
    }

    fn admit(&self, state: &mut State, request: Request) {
        if TOKEN > state.max_token {
            set(state, request, Attempt::Admitted);
        } else {
            refuse(state, request);
        }
    }

    /// Commits the write, and returns its answer.
    fn commit(&self, state: &mut State, request: Request) -> u8 {
        let Attempt::Written(answer) = state.attempts[request as usize] else {
            unreachable!("only a request that has written commits");
        };
        state.written[request.body() as usize] += 1;
        state.max_token = highest_stale(state, TOKEN);
        if self.rules.has(Rule::RecordIsWritten) {
            record(state, request, Some(answer));
            set(state, request, Attempt::Over);
        } else {
            set(state, request, Attempt::Unrecorded(answer));
        }
        answer
    }
}

fn set(state: &mut State, request: Request, attempt: Attempt) {
    state.attempts[request as usize] = attempt;
}

fn record(state: &mut State, request: Request, answer: Option<u8>) {
    let body = request.body();
    state.record = Some(Record { body, answer });
}

fn hear(state: &mut State, request: Request, answer: u8) {
    let first = state.answers[request.body() as usize].get_or_insert(answer);
    state.answers_differ |= *first != answer;
}

fn refuse(state: &mut State, request: Request) {
    set(state, request, Attempt::Over);
    let is_done = |record: Record| record.body == request.body() && record.answer.is_some();
    state.refused_done |= state.record.is_some_and(is_done);
}

fn end_transactions(state: &mut State) {
    for attempt in &mut state.attempts {
        if has_key(*attempt) {
            *attempt = Attempt::Over;
        }
    }
}

fn fail_over(state: &mut State) {
    state.failovers -= 1;
    end_transactions(state);
    let kept = state.standby.take().expect("a standby lags");
    state.max_token = kept.max_token;
    state.record = kept.record;
    state.written = kept.written;
    state.expired = kept.expired;
    state.newer = kept.newer;
    state.is_behind = true;
    // The answer to a lost write is no longer compared.
    for (answer, times) in state.answers.iter_mut().zip(state.written) {
        answer.take_if(|_| times == 0);
    }
}

fn highest_stale(state: &State, token: u8) -> u8 {
    token - u8::from(!state.single_use)
}

/// Whether the transaction of a request is open and has claimed the key.
const fn has_key(attempt: Attempt) -> bool {
    matches!(
        attempt,
        Attempt::Claimed | Attempt::Admitted | Attempt::Written(_) | Attempt::Unrecorded(_)
    )
}

const fn has_row(attempt: Attempt) -> bool {
    matches!(attempt, Attempt::Admitted | Attempt::Written(_))
}
