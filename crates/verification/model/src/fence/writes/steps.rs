//! The possible steps, and their effects.

use super::{
    Rule, Writes,
    state::{Attempt, Data, Database, FORGED, MOVE, Request, Stage, State, Verdict, Who},
};

#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub enum Step {
    Grant(Who),
    /// The grant is answered, after its announcement if grants are announced.
    AnswerGrant(Who),
    /// A fenced read is admitted or refused.
    AdmitRead(Who),
    Read(Who),
    /// A fenced read commits and is answered.
    CommitRead(Who),
    /// The client of a fenced read disconnects, or its connection is lost before COMMIT has
    /// arrived.
    EndRead(Who),
    /// A fenced read is answered before its COMMIT. This step needs a rule to be left out.
    AnswerReadBeforeCommit(Who),
    Send(Who),
    SendAgain(Who),
    /// A single statement takes its snapshot.
    BeginStatement(Who, Request),
    /// A single statement locks the row. It writes and commits, or gives up.
    RunStatement(Who, Request),
    /// The token is compared, and `max_token` is moved later. This step needs a rule to be left
    /// out.
    Compare(Who, Request),
    /// A request is admitted in a transaction, or refused.
    Admit(Who, Request),
    Write(Who, Request),
    Commit(Who, Request),
    /// The answer of a success arrives.
    AnswerSuccess(Who, Request),
    /// The answer of a success is lost.
    AnswerIsLost(Who, Request),
    /// The connection is lost before COMMIT has arrived. The service cannot distinguish this from a
    /// loss after the COMMIT.
    CommitFails(Who, Request),
    /// A success is answered before its COMMIT. This step needs a rule to be left out.
    AnswerBeforeCommit(Who, Request),
    /// The handler returns a failure, and its transaction is rolled back.
    Fail(Who, Request),
    /// A statement fails, and the handler still returns a success.
    SwallowError(Who, Request),
    CommitAborted(Who, Request),
    /// The failure is answered, after the raise.
    AnswerFailure(Who, Request),
    /// The client disconnects while its handler runs.
    GoAway(Who, Request),
    /// The handler returns 401.
    TurnAway(Who, Request),
    /// The fence moves all tokens up after a failover.
    CatchUp,
    Crash,
    /// The standby stops replicating.
    FallBehind,
    FailOver,
}

impl Writes {
    pub(super) fn possible(&self, state: &State, steps: &mut Vec<Step>) {
        let free = !self.row_is_locked(state);
        for (place, who) in Who::HOLDERS[..self.holders].iter().enumerate() {
            self.before_write(state, *who, place, free, steps);
        }
        if state.left.strangers > 0 {
            steps.push(Step::Send(Who::Stranger));
        }
        for who in Who::ALL {
            for request in Request::ALL {
                self.on_server(state, who, request, free, steps);
            }
        }
        if free && state.is_behind() {
            steps.push(Step::CatchUp);
        }
        let busy = state.is_read() || state.attempts().any(is_in_database);
        if state.left.crashes > 0 && busy {
            steps.push(Step::Crash);
        }
        if state.left.failovers > 0 {
            steps.push(match state.standby {
                None => Step::FallBehind,
                Some(_) => Step::FailOver,
            });
        }
    }

    fn before_write(
        &self,
        state: &State,
        who: Who,
        place: usize,
        free: bool,
        steps: &mut Vec<Step>,
    ) {
        let holder = state.holder(who);
        let mode = state.mode;
        match holder.stage {
            Stage::Idle => {
                // Holders are granted leases in order.
                if place == 0 || state.holders[place - 1].token > 0 {
                    steps.push(Step::Grant(who));
                }
            }
            Stage::Granted if mode.announced => {
                if free && !state.is_behind() {
                    steps.push(Step::AnswerGrant(who));
                }
            }
            Stage::Granted if self.rules.has(Rule::FencedRead) => {
                if free && self.is_up_to_date(state) {
                    steps.push(Step::AdmitRead(who));
                }
            }
            Stage::Granted | Stage::Announced => steps.push(Step::Read(who)),
            Stage::Admitted => {
                steps.push(Step::Read(who));
                steps.push(Step::EndRead(who));
            }
            Stage::HasRead => {
                // The lock of the read itself does not block its COMMIT.
                if self.rules.has(Rule::ReadLocks) || free {
                    steps.push(Step::CommitRead(who));
                }
                steps.push(Step::EndRead(who));
                if !self.rules.has(Rule::ReadCommits) {
                    steps.push(Step::AnswerReadBeforeCommit(who));
                }
            }
            Stage::AnsweredEarly => steps.push(Step::CommitRead(who)),
            Stage::Ready => match holder.attempts {
                [Attempt::None, _] => steps.push(Step::Send(who)),
                [_, Attempt::None] if state.left.repetitions > 0 => {
                    let is_unheard = holder.verdicts[0] == Verdict::None;
                    let may_go_on = match mode.single_use {
                        true => is_unheard || holder.verdicts[0] == Verdict::Failed,
                        // A holder that writes back must know the value that its first write has
                        // stored.
                        false => !(mode.writes_back && is_unheard),
                    };
                    if may_go_on {
                        steps.push(Step::SendAgain(who));
                    }
                }
                _ => {}
            },
            Stage::Superseded => {}
        }
    }

    fn on_server(
        &self,
        state: &State,
        who: Who,
        request: Request,
        free: bool,
        steps: &mut Vec<Step>,
    ) {
        let admit = if self.rules.has(Rule::OneStatement) {
            Step::Admit
        } else {
            Step::Compare
        };
        match state.attempt(who, request) {
            Attempt::None | Attempt::Over | Attempt::LeftOpen => {}
            Attempt::Begun(_) => {
                if free {
                    steps.push(Step::RunStatement(who, request));
                }
            }
            sent @ (Attempt::Sent | Attempt::GaveUp) => {
                if state.mode.at_once && sent == Attempt::Sent && who != Who::Stranger {
                    steps.push(Step::BeginStatement(who, request));
                }
                if free && self.is_up_to_date(state) {
                    steps.push(admit(who, request));
                }
            }
            Attempt::Compared => {
                if free {
                    steps.push(Step::Admit(who, request));
                }
            }
            Attempt::Admitted if who == Who::Stranger => steps.push(Step::TurnAway(who, request)),
            Attempt::Admitted => {
                if !state.data_is_locked() {
                    steps.push(Step::Write(who, request));
                }
                if state.left.failures > 0 {
                    steps.push(Step::Fail(who, request));
                    steps.push(Step::SwallowError(who, request));
                }
                steps.push(Step::GoAway(who, request));
            }
            Attempt::Written(_) => {
                if state.left.failures > 0 {
                    steps.push(Step::Fail(who, request));
                }
                steps.push(Step::Commit(who, request));
                steps.push(Step::CommitFails(who, request));
                let answered = state.verdict(who, request) == Verdict::Done;
                if !self.rules.has(Rule::CommitBeforeAnswer) && !answered {
                    steps.push(Step::AnswerBeforeCommit(who, request));
                }
            }
            Attempt::Committed => {
                steps.push(Step::AnswerSuccess(who, request));
                steps.push(Step::AnswerIsLost(who, request));
            }
            Attempt::Aborted => steps.push(Step::CommitAborted(who, request)),
            Attempt::Failing => {
                if free && !state.is_behind() {
                    steps.push(Step::AnswerFailure(who, request));
                }
            }
        }
    }

    pub(super) fn take(&self, before: &State, step: Step) -> State {
        let mut state = before.clone();
        match step {
            Step::Grant(who) => {
                let holder = state.holder_mut(who);
                holder.token = who as u8 + 1 + MOVE * before.timeline;
                holder.stage = match before.mode {
                    // The statement of this holder reads the current value itself.
                    mode if !mode.announced && !mode.writes_back => Stage::Ready,
                    _ => Stage::Granted,
                };
            }
            Step::AnswerGrant(who) => self.answer_grant(&mut state, who),
            Step::AdmitRead(who) => self.admit_read(&mut state, who),
            Step::Read(who) => self.read(&mut state, who),
            Step::CommitRead(who) => self.commit_read(&mut state, who),
            Step::EndRead(who) => state.holder_mut(who).stage = Stage::Granted,
            Step::AnswerReadBeforeCommit(who) => {
                state.answer(before.holder(who).token);
                state.holder_mut(who).stage = Stage::AnsweredEarly;
            }
            Step::Send(who) => {
                if who == Who::Stranger {
                    state.left.strangers -= 1;
                }
                state.set(who, Request::First, Attempt::Sent);
            }
            Step::SendAgain(who) => {
                state.left.repetitions -= 1;
                state.set(who, Request::Again, Attempt::Sent);
                let is_known = matches!(
                    before.holder(who).verdicts[0],
                    Verdict::Done | Verdict::Lost
                );
                if !before.mode.single_use && before.mode.writes_back && is_known {
                    // The second write is based on the first one.
                    let read = before.holder(who).read;
                    state.holder_mut(who).read = before.change(who, Request::First, read);
                }
            }
            Step::BeginStatement(who, request) => {
                state.set(who, request, Attempt::Begun(before.committed));
            }
            Step::RunStatement(who, request) => self.run_statement(&mut state, who, request),
            Step::Compare(who, request) => {
                let alive = self.is_alive(before, before.holder(who).token);
                state.set(who, request, Attempt::Compared);
                if !alive {
                    self.refuse(&mut state, who, request);
                }
            }
            Step::Admit(who, request) => self.admit(&mut state, who, request),
            Step::Write(who, request) => {
                let written = self.written(before, who, request, before.committed);
                state.set(who, request, Attempt::Written(written));
            }
            Step::Commit(who, request) => {
                let Attempt::Written(data) = before.attempt(who, request) else {
                    unreachable!("only a request that has written commits");
                };
                let mut committed = Database {
                    data,
                    ..before.committed
                };
                if self.rules.has(Rule::OneTransaction) {
                    self.move_row(&mut committed, before, who);
                }
                self.commit_write(&mut state, who, request, committed);
            }
            Step::AnswerSuccess(who, request) => {
                state.set(who, request, Attempt::Over);
                self.succeed(&mut state, who, request);
            }
            Step::CommitFails(who, request) => {
                state.set(who, request, Attempt::Over);
                if !self.rules.has(Rule::UnknownIsNoSuccess) {
                    self.succeed(&mut state, who, request);
                }
            }
            Step::AnswerBeforeCommit(who, request) => self.succeed(&mut state, who, request),
            Step::Fail(who, request) => {
                state.left.failures -= 1;
                state.set(who, request, Attempt::Failing);
            }
            Step::SwallowError(who, request) => {
                state.left.failures -= 1;
                state.set(who, request, Attempt::Aborted);
            }
            Step::CommitAborted(who, request) => {
                if self.rules.has(Rule::AbortedIsFound) {
                    state.set(who, request, Attempt::Failing);
                } else {
                    state.set(who, request, Attempt::Over);
                    self.succeed(&mut state, who, request);
                }
            }
            Step::AnswerFailure(who, request) => self.answer_failure(&mut state, who, request),
            Step::GoAway(who, request) => {
                let end = match self.rules.has(Rule::GoneAway) {
                    true => Attempt::Over,
                    false => Attempt::LeftOpen,
                };
                state.set(who, request, end);
            }
            Step::AnswerIsLost(who, request) => state.set(who, request, Attempt::Over),
            Step::TurnAway(who, request) => {
                state.set(who, request, Attempt::Over);
                if !self.rules.has(Rule::Rejected) {
                    self.raise(&mut state, FORGED);
                }
            }
            Step::CatchUp => {
                let mut moved = before.committed;
                moved.row.max_token = moved.row.max_token.max(MOVE * before.timeline);
                moved.row.timeline = before.timeline;
                moved.row.version += 1;
                state.committed = moved;
            }
            Step::Crash => {
                state.left.crashes -= 1;
                end_transactions(&mut state);
            }
            Step::FallBehind => state.standby = Some(before.committed),
            Step::FailOver => self.fail_over(&mut state),
        }
        state
    }

    fn answer_grant(&self, state: &mut State, who: Who) {
        let token = state.holder(who).token;
        let mut stage = Stage::Announced;
        if self.rules.has(Rule::Announcement) {
            if state.committed.row.max_token < token {
                self.raise(state, token);
                state.answer(token);
            } else {
                stage = superseded(state, who);
            }
        }
        if stage == Stage::Announced && !state.mode.writes_back {
            stage = Stage::Ready;
        }
        state.holder_mut(who).stage = stage;
    }

    fn admit_read(&self, state: &mut State, who: Who) {
        let token = state.holder(who).token;
        let stage = if self.is_alive(state, token) {
            state.older_admitted |= token < state.answered;
            Stage::Admitted
        } else {
            superseded(state, who)
        };
        state.holder_mut(who).stage = stage;
    }

    fn read(&self, state: &mut State, who: Who) {
        let data = state.committed.data;
        let holder = state.holder_mut(who);
        holder.read = data;
        holder.stage = match holder.stage {
            Stage::Admitted => Stage::HasRead,
            _ => Stage::Ready,
        };
    }

    /// Commits a fenced read, which is a reusable write that writes nothing.
    fn commit_read(&self, state: &mut State, who: Who) {
        let token = state.holder(who).token;
        let mut row = state.committed.row;
        // Another client can have changed `max_token` only if the read has not locked the row.
        if row.max_token < token {
            row.max_token = token - u8::from(self.rules.has(Rule::ReadLeavesToken));
            row.version += 1;
            state.committed.row = row;
        }
        state.answer(token);
        state.holder_mut(who).stage = Stage::Ready;
    }

    fn admit(&self, state: &mut State, who: Who, request: Request) {
        // If the token was compared in a separate statement, it is not compared again.
        let compared = state.attempt(who, request) == Attempt::Compared;
        if !compared && !self.is_alive(state, state.holder(who).token) {
            return self.refuse(state, who, request);
        }
        state.set(who, request, Attempt::Admitted);
        if !self.rules.has(Rule::OneTransaction) {
            let mut admitted = state.committed;
            self.move_row(&mut admitted, state, who);
            state.committed = admitted;
        }
    }

    fn run_statement(&self, state: &mut State, who: Who, request: Request) {
        let Attempt::Begun(snapshot) = state.attempt(who, request) else {
            unreachable!("the statement has taken its snapshot");
        };
        let (seen, now) = (snapshot.row, state.committed.row);
        let same = if !self.rules.has(Rule::Guard) {
            true
        } else if !self.rules.has(Rule::GuardByVersion) {
            seen.max_token == now.max_token
        } else {
            seen.version == now.version
        };
        let alive = self.is_alive(state, state.holder(who).token) && self.is_up_to_date(state);
        if !same || !alive {
            return state.set(who, request, Attempt::GaveUp);
        }
        let mut committed = state.committed;
        committed.data = self.written(state, who, request, snapshot);
        self.move_row(&mut committed, state, who);
        self.commit_write(state, who, request, committed);
    }

    /// Returns the data that the statement of a request writes, based on the data that it sees.
    fn written(&self, state: &State, who: Who, request: Request, seen: Database) -> Data {
        let data = match state.mode.writes_back {
            true => state.holder(who).read,
            false => seen.data,
        };
        state.change(who, request, data)
    }

    fn commit_write(&self, state: &mut State, who: Who, request: Request, committed: Database) {
        state.set(who, request, Attempt::Committed);
        state.committed = committed;
        state.count_commit(who, request);
    }

    fn succeed(&self, state: &mut State, who: Who, request: Request) {
        state.answer(state.holder(who).token);
        let verdict = state.verdict_mut(who, request);
        if *verdict != Verdict::Lost {
            *verdict = Verdict::Done;
        }
    }

    fn refuse(&self, state: &mut State, who: Who, request: Request) {
        state.set(who, request, Attempt::Over);
        if who == Who::Stranger {
            return;
        }
        let place = State::place(who, state.write_of(request));
        let is_used_up = state.mode.single_use && state.commits[place] > 0;
        state.refused_for_nothing |= !is_used_up && !may_be_refused(state, who);
        let verdict = state.verdict_mut(who, request);
        if matches!(verdict, Verdict::None | Verdict::Failed) {
            *verdict = Verdict::Refused;
        }
    }

    fn answer_failure(&self, state: &mut State, who: Who, request: Request) {
        state.set(who, request, Attempt::Over);
        let token = state.holder(who).token;
        if self.rules.has(Rule::RaiseAfterFailure) {
            self.raise(state, token);
        }
        state.answer(token);
        let verdict = state.verdict_mut(who, request);
        if *verdict == Verdict::None {
            *verdict = Verdict::Failed;
        }
    }

    /// Makes all older tokens stale, unless they are stale already.
    fn raise(&self, state: &mut State, token: u8) {
        let highest_stale = token - u8::from(self.rules.has(Rule::OneBelow));
        if state.committed.row.max_token < highest_stale || !self.rules.has(Rule::NeverBack) {
            let mut raised = state.committed;
            raised.row.max_token = highest_stale;
            raised.row.version += 1;
            state.committed = raised;
        }
    }

    /// Changes the row as an admission does.
    fn move_row(&self, database: &mut Database, state: &State, who: Who) {
        let highest_stale = state.holder(who).token - u8::from(!state.mode.single_use);
        let moves = database.row.max_token != highest_stale;
        database.row.max_token = highest_stale;
        if moves || self.rules.has(Rule::NewVersion) {
            database.row.version += 1;
        }
    }

    fn fail_over(&self, state: &mut State) {
        state.left.failovers -= 1;
        end_transactions(state);
        state.timeline += 1;
        state.committed = state.standby.take().expect("a standby lags");
        if !self.rules.has(Rule::MoveAfterFailover) {
            state.committed.row.timeline = state.timeline;
        }
        state.commits = state.committed.data;
        for (who, request) in Who::HOLDERS
            .into_iter()
            .flat_map(|who| Request::ALL.map(|request| (who, request)))
        {
            // A committed attempt counts as done, because its success may still be answered.
            let is_done = state.verdict(who, request) == Verdict::Done
                || state.attempt(who, request) == Attempt::Committed;
            if is_done && state.commits[State::place(who, state.write_of(request))] == 0 {
                *state.verdict_mut(who, request) = Verdict::Lost;
            }
        }
    }

    fn is_alive(&self, state: &State, token: u8) -> bool {
        let max_token = state.committed.row.max_token;
        token > max_token || token == max_token && !self.rules.has(Rule::Newer)
    }

    /// Whether the row may admit tokens without a check for a failover.
    fn is_up_to_date(&self, state: &State) -> bool {
        !state.is_behind() || !self.rules.has(Rule::NoticesFailover)
    }

    fn row_is_locked(&self, state: &State) -> bool {
        self.rules.has(Rule::OneTransaction) && state.is_written()
            || self.rules.has(Rule::ReadLocks) && state.is_read()
            || self.one_writer && state.data_is_locked()
    }
}

/// Records that a grant or a read is refused.
fn superseded(state: &mut State, who: Who) -> Stage {
    state.refused_for_nothing |= !may_be_refused(state, who);
    Stage::Superseded
}

/// Whether a holder may be refused: there is a newer grant, or a failover has moved all tokens up.
fn may_be_refused(state: &State, who: Who) -> bool {
    let mut holders = Who::HOLDERS.iter();
    let newer = holders.any(|other| state.holder(*other).token > state.holder(who).token);
    newer || state.timeline > 0
}

/// Whether a crash of the database ends this attempt.
const fn is_in_database(attempt: Attempt) -> bool {
    matches!(
        attempt,
        Attempt::Begun(_)
            | Attempt::Admitted
            | Attempt::Written(_)
            | Attempt::Aborted
            | Attempt::LeftOpen
    )
}

fn end_transactions(state: &mut State) {
    for holder in &mut state.holders {
        holder.stage = match holder.stage {
            // The holder reads again.
            Stage::Admitted | Stage::HasRead => Stage::Granted,
            Stage::AnsweredEarly => Stage::Ready,
            other => other,
        };
        for attempt in &mut holder.attempts {
            if is_in_database(*attempt) {
                *attempt = Attempt::Over;
            }
        }
    }
}
