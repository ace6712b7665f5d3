//! What can happen next, and what comes of it.

use super::{
    Rule, Writes,
    state::{Attempt, Database, FORGED, MOVE, Request, Stage, State, Verdict, Who},
};

#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub enum Step {
    Grant(Who),
    /// After it was announced, where it is.
    AnswerGrant(Who),
    /// A fenced read begins.
    Look(Who),
    Read(Who),
    RaiseAfterRead(Who),
    Send(Who),
    SendAgain(Who),
    /// A single statement takes its snapshot.
    BeginStatement(Who, Request),
    /// It has the row's lock, and writes and commits, or gives up.
    RunStatement(Who, Request),
    /// The same, and the answer is lost.
    RunStatementUnheard(Who, Request),
    /// The token is compared, and moved later: only where that is not one statement.
    Compare(Who, Request),
    /// Admitted in a transaction, or refused.
    Admit(Who, Request),
    Write(Who, Request),
    Commit(Who, Request),
    /// Committed, and the answer is lost.
    CommitUnheard(Who, Request),
    /// The connection is lost before COMMIT has arrived, which the service cannot tell from after.
    CommitFails(Who, Request),
    /// Only where COMMIT is not waited for.
    AnswerBeforeCommit(Who, Request),
    /// The handler answers a failure, and its transaction is rolled back.
    Fail(Who, Request),
    /// A statement fails, and the handler answers a success.
    SwallowError(Who, Request),
    CommitAborted(Who, Request),
    /// After the fence was raised.
    AnswerFailure(Who, Request),
    /// The client goes away while its handler runs.
    GoAway(Who, Request),
    /// The handler answers 401.
    TurnAway(Who, Request),
    /// The fence moves all tokens up, after a failover.
    CatchUp,
    Crash,
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
        if free && state.committed.row.history != state.history {
            steps.push(Step::CatchUp);
        }
        let busy = state.attempts().any(is_in_database);
        if state.left.crashes > 0 && busy {
            steps.push(Step::Crash);
        }
        if state.left.failovers > 0 {
            steps.push(Step::FailOver);
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
                // One after the other.
                if place == 0 || state.holders[place - 1].token > 0 {
                    steps.push(Step::Grant(who));
                }
            }
            Stage::Granted if mode.announced => {
                if free && self.in_history(state) {
                    steps.push(Step::AnswerGrant(who));
                }
            }
            Stage::Granted if self.follows(Rule::FencedRead) => steps.push(Step::Look(who)),
            Stage::Granted | Stage::Announced | Stage::Looked(_) | Stage::Overtaken => {
                steps.push(Step::Read(who));
            }
            Stage::HasRead(_) => {
                if free {
                    steps.push(Step::RaiseAfterRead(who));
                }
            }
            Stage::Ready => match (holder.attempts, holder.verdict) {
                ([Attempt::None, _], _) => steps.push(Step::Send(who)),
                ([_, Attempt::None], Verdict::None | Verdict::Failed)
                    if mode.single_use && state.left.repetitions > 0 =>
                {
                    steps.push(Step::SendAgain(who));
                }
                _ => {}
            },
            Stage::Outranked => {}
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
        let admit = if self.follows(Rule::OneStatement) {
            Step::Admit
        } else {
            Step::Compare
        };
        match state.attempt(who, request) {
            Attempt::None | Attempt::Over => {}
            Attempt::Begun(_) => {
                if free {
                    steps.push(Step::RunStatement(who, request));
                    steps.push(Step::RunStatementUnheard(who, request));
                }
            }
            sent @ (Attempt::Sent | Attempt::GaveUp) => {
                if state.mode.at_once && sent == Attempt::Sent && who != Who::Stranger {
                    steps.push(Step::BeginStatement(who, request));
                }
                if free && self.in_history(state) {
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
                steps.push(Step::CommitUnheard(who, request));
                steps.push(Step::CommitFails(who, request));
                let answered = state.holder(who).verdict == Verdict::Done;
                if !self.follows(Rule::CommitBeforeAnswer) && !answered {
                    steps.push(Step::AnswerBeforeCommit(who, request));
                }
            }
            Attempt::Aborted => steps.push(Step::CommitAborted(who, request)),
            Attempt::Failing => {
                if free {
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
                holder.token = who as u8 + 1 + MOVE * before.history;
                holder.stage = match before.mode {
                    // Its statement reads what it needs by itself.
                    mode if !mode.announced && !mode.writes_back => Stage::Ready,
                    _ => Stage::Granted,
                };
            }
            Step::AnswerGrant(who) => self.answer_grant(&mut state, who),
            Step::Look(who) => self.look(&mut state, who),
            Step::Read(who) => self.read(&mut state, who),
            Step::RaiseAfterRead(who) => self.raise_after_read(&mut state, who),
            Step::Send(who) => {
                if who == Who::Stranger {
                    state.left.strangers -= 1;
                }
                state.set(who, Request::First, Attempt::Sent);
            }
            Step::SendAgain(who) => {
                state.left.repetitions -= 1;
                state.set(who, Request::Again, Attempt::Sent);
            }
            Step::BeginStatement(who, request) => {
                state.set(who, request, Attempt::Begun(before.committed));
            }
            Step::RunStatement(who, request) => {
                if self.run_statement(&mut state, who, request) {
                    self.succeed(&mut state, who);
                }
            }
            Step::RunStatementUnheard(who, request) => {
                self.run_statement(&mut state, who, request);
            }
            Step::Compare(who, request) => {
                let alive = self.is_alive(before, before.holder(who).token);
                state.set(who, request, Attempt::Compared);
                if !alive {
                    self.refuse(&mut state, who, request);
                }
            }
            Step::Admit(who, request) => self.admit(&mut state, who, request),
            Step::Write(who, request) => {
                let written = self.written(before, who, before.committed);
                state.set(who, request, Attempt::Written(written));
            }
            Step::Commit(who, request) | Step::CommitUnheard(who, request) => {
                let Attempt::Written(data) = before.attempt(who, request) else {
                    unreachable!("it was written");
                };
                let mut committed = Database {
                    data,
                    ..before.committed
                };
                if self.follows(Rule::OneTransaction) {
                    self.move_row(&mut committed, before, who);
                }
                self.commit_write(&mut state, who, request, committed);
                if matches!(step, Step::Commit(..)) {
                    self.succeed(&mut state, who);
                }
            }
            Step::CommitFails(who, request) => {
                state.set(who, request, Attempt::Over);
                if !self.follows(Rule::UnknownIsNoSuccess) {
                    self.succeed(&mut state, who);
                }
            }
            Step::AnswerBeforeCommit(who, _) => self.succeed(&mut state, who),
            Step::Fail(who, request) => {
                state.left.failures -= 1;
                state.set(who, request, Attempt::Failing);
            }
            Step::SwallowError(who, request) => {
                state.left.failures -= 1;
                state.set(who, request, Attempt::Aborted);
            }
            Step::CommitAborted(who, request) => {
                if self.follows(Rule::AbortedIsFound) {
                    state.set(who, request, Attempt::Failing);
                } else {
                    state.set(who, request, Attempt::Over);
                    self.succeed(&mut state, who);
                }
            }
            Step::AnswerFailure(who, request) => self.answer_failure(&mut state, who, request),
            Step::GoAway(who, request) => state.set(who, request, Attempt::Over),
            Step::TurnAway(who, request) => {
                state.set(who, request, Attempt::Over);
                if !self.follows(Rule::TurnedAway) {
                    self.raise(&mut state, FORGED);
                }
            }
            Step::CatchUp => {
                let mut moved = before.committed;
                moved.row.max_token = moved.row.max_token.max(MOVE * before.history);
                moved.row.history = before.history;
                moved.row.version += 1;
                state.commit(moved);
            }
            Step::Crash => {
                state.left.crashes -= 1;
                end_transactions(&mut state);
            }
            Step::FailOver => self.fail_over(&mut state),
        }
        state
    }

    fn answer_grant(&self, state: &mut State, who: Who) {
        let token = state.holder(who).token;
        let mut stage = Stage::Announced;
        if self.follows(Rule::Announcement) {
            if state.committed.row.max_token < token {
                self.raise(state, token);
                state.answer(token);
            } else {
                stage = Stage::Outranked;
            }
        }
        if stage == Stage::Announced && !state.mode.writes_back {
            stage = Stage::Ready;
        }
        state.holder_mut(who).stage = stage;
    }

    fn look(&self, state: &mut State, who: Who) {
        let token = state.holder(who).token;
        let row = state.committed.row;
        let stage = if row.max_token == token - 1 {
            Stage::Looked(None)
        } else if row.max_token >= token {
            Stage::Outranked
        } else {
            Stage::Looked(Some(row.version))
        };
        state.holder_mut(who).stage = stage;
    }

    fn read(&self, state: &mut State, who: Who) {
        let data = state.committed.data;
        let holder = state.holder_mut(who);
        holder.read = data;
        let token = holder.token;
        holder.stage = match holder.stage {
            Stage::Looked(Some(version)) => Stage::HasRead(version),
            _ => Stage::Ready,
        };
        if holder.stage == Stage::Ready && !state.mode.announced && self.follows(Rule::FencedRead) {
            state.answer(token);
        }
    }

    fn raise_after_read(&self, state: &mut State, who: Who) {
        let holder = state.holder(who);
        let (token, Stage::HasRead(version)) = (holder.token, holder.stage) else {
            unreachable!("it has read");
        };
        let row = state.committed.row;
        let unwritten = row.version == version && row.max_token < token - 1;
        let stage = if row.max_token >= token {
            Stage::Outranked
        } else {
            self.raise(state, token);
            if unwritten || !self.follows(Rule::ReadAgain) {
                state.answer(token);
                Stage::Ready
            } else {
                Stage::Overtaken
            }
        };
        state.holder_mut(who).stage = stage;
    }

    fn admit(&self, state: &mut State, who: Who, request: Request) {
        // What was compared before is not looked at again, where that is another statement.
        let compared = state.attempt(who, request) == Attempt::Compared;
        if !compared && !self.is_alive(state, state.holder(who).token) {
            return self.refuse(state, who, request);
        }
        state.set(who, request, Attempt::Admitted);
        if !self.follows(Rule::OneTransaction) {
            let mut admitted = state.committed;
            self.move_row(&mut admitted, state, who);
            state.commit(admitted);
        }
    }

    /// Whether it has written.
    fn run_statement(&self, state: &mut State, who: Who, request: Request) -> bool {
        let Attempt::Begun(snapshot) = state.attempt(who, request) else {
            unreachable!("it has its snapshot");
        };
        let (seen, now) = (snapshot.row, state.committed.row);
        let same = if !self.follows(Rule::Guard) {
            true
        } else if !self.follows(Rule::GuardByVersion) {
            seen.max_token == now.max_token
        } else {
            seen.version == now.version
        };
        let alive = self.is_alive(state, state.holder(who).token) && self.in_history(state);
        if !same || !alive {
            state.set(who, request, Attempt::GaveUp);
            return false;
        }
        let mut committed = state.committed;
        committed.data = self.written(state, who, snapshot);
        self.move_row(&mut committed, state, who);
        self.commit_write(state, who, request, committed);
        true
    }

    /// What the statement of a holder's request makes of the data that it sees.
    fn written(&self, state: &State, who: Who, seen: Database) -> [u8; 3] {
        if state.mode.writes_back {
            State::change(who, state.holder(who).read)
        } else {
            State::change(who, seen.data)
        }
    }

    fn commit_write(&self, state: &mut State, who: Who, request: Request, committed: Database) {
        state.set(who, request, Attempt::Over);
        state.commit(committed);
        state.count_commit(who);
    }

    fn succeed(&self, state: &mut State, who: Who) {
        let token = state.holder(who).token;
        state.answer(token);
        state.holder_mut(who).verdict = Verdict::Done;
    }

    fn refuse(&self, state: &mut State, who: Who, request: Request) {
        state.set(who, request, Attempt::Over);
        let used_up = who == Who::Stranger || state.commits_of(who) > 0;
        let holder = state.holder_mut(who);
        let token = holder.token;
        if holder.verdict != Verdict::Done {
            holder.verdict = Verdict::Refused;
        }
        let mut holders = Who::HOLDERS.iter();
        let newer = holders.any(|other| state.holder(*other).token > token);
        state.refused_for_nothing |= !used_up && !newer && state.history == 0;
    }

    fn answer_failure(&self, state: &mut State, who: Who, request: Request) {
        state.set(who, request, Attempt::Over);
        let token = state.holder(who).token;
        if self.follows(Rule::RaiseAfterFailure) {
            self.raise(state, token);
        }
        state.answer(token);
        let holder = state.holder_mut(who);
        if holder.verdict == Verdict::None {
            holder.verdict = Verdict::Failed;
        }
    }

    /// Everyone older is dead; nothing is done where that is so.
    fn raise(&self, state: &mut State, token: u8) {
        let dead = token - u8::from(self.follows(Rule::OneBelow));
        if state.committed.row.max_token < dead || !self.follows(Rule::NeverBack) {
            let mut raised = state.committed;
            raised.row.max_token = dead;
            raised.row.version += 1;
            state.commit(raised);
        }
    }

    /// What an admission makes of the row.
    fn move_row(&self, database: &mut Database, state: &State, who: Who) {
        let dead = state.holder(who).token - u8::from(!state.mode.single_use);
        let moves = database.row.max_token != dead;
        database.row.max_token = dead;
        if moves || self.follows(Rule::NewVersion) {
            database.row.version += 1;
        }
    }

    fn fail_over(&self, state: &mut State) {
        state.left.failovers -= 1;
        end_transactions(state);
        state.history += 1;
        state.committed = state.standby;
        if !self.follows(Rule::MoveAfterFailover) {
            state.committed.row.history = state.history;
            state.standby = state.committed;
        }
        state.commits = state.committed.data;
        for who in Who::HOLDERS {
            if state.commits_of(who) == 0 && state.holder(who).verdict == Verdict::Done {
                state.holder_mut(who).verdict = Verdict::Lost;
            }
        }
    }

    fn is_alive(&self, state: &State, token: u8) -> bool {
        let max_token = state.committed.row.max_token;
        token > max_token || token == max_token && !self.follows(Rule::Newer)
    }

    fn in_history(&self, state: &State) -> bool {
        state.committed.row.history == state.history
    }

    fn row_is_locked(&self, state: &State) -> bool {
        self.follows(Rule::OneTransaction) && state.is_open()
            || self.one_writer && state.data_is_locked()
    }
}

/// Whether a crash of the database ends it.
const fn is_in_database(attempt: Attempt) -> bool {
    matches!(
        attempt,
        Attempt::Begun(_) | Attempt::Admitted | Attempt::Written(_) | Attempt::Aborted
    )
}

fn end_transactions(state: &mut State) {
    for holder in &mut state.holders {
        for attempt in &mut holder.attempts {
            if is_in_database(*attempt) {
                *attempt = Attempt::Over;
            }
        }
    }
}
