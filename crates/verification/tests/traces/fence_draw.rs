//! The choice of the next step of a trace of the fence. Rare situations get a higher probability,
//! and steps whose outcome would depend on chance are excluded.

use rand::{RngExt, seq::IndexedRandom};
use tower_fence_model::fence::writes::{Attempt, Database, Step, Who};

use super::{
    fence::{Trace, has_sessions},
    fence_real::Real,
};
use crate::support::database::TestDatabase;

impl<R: Real> Trace<'_, R> {
    pub(super) fn draw(&mut self) -> Option<Step> {
        if let Some(step) = self.next_of_single() {
            return Some(step);
        }
        let mut steps = self.walk.possible();
        let waits = self.single.is_some();
        let free = !self.walk.state.is_open();
        let on_sqlite = !R::DB::ABORTS_ON_ERROR;
        steps.retain(|step| match step {
            // There is at most one single statement at a time. It may wait if its token is not
            // stale. On SQLite, it would wait for all writers, so it begins only if the database is
            // free.
            Step::BeginStatement(who, _) => {
                let alive = self.token_of(*who) > self.max_token();
                !waits && (free || alive && !on_sqlite)
            }
            // On SQLite, a failed statement does not abort the transaction.
            Step::SwallowError(..) => !on_sqlite,
            // If a statement waits, a crash could occur before or after the statement. The order is
            // deterministic only in a database with sessions, which are terminated one by one.
            Step::Crash => !waits || has_sessions::<R::DB>(),
            _ => true,
        });
        // The interesting case: a statement that waits for a write under an older token, and for
        // its COMMIT.
        let has_row = self.has_row().map(|who| self.token_of(who));
        let is_rare = |step: &&Step| match *step {
            Step::Admit(who, _) => !waits && self.is_sent_above(*who),
            Step::BeginStatement(who, _) => {
                has_row.is_some_and(|token| self.token_of(*who) > token)
            }
            Step::Write(..) | Step::Commit(..) => waits,
            _ => false,
        };
        let rare: Vec<Step> = steps.iter().filter(is_rare).copied().collect();
        // Failures are drawn less often. Otherwise few traces would reach a COMMIT.
        let goes_wrong = |step: &Step| {
            let of_handler = matches!(step, Step::Fail(..) | Step::SwallowError(..));
            let of_client = matches!(
                step,
                Step::GoAway(..) | Step::CommitFails(..) | Step::EndRead(_)
            );
            of_handler
                || of_client
                || matches!(step, Step::Crash | Step::FallBehind | Step::FailOver)
        };
        if !steps.iter().all(goes_wrong) && self.walk.random.random_bool(0.6) {
            steps.retain(|step| !goes_wrong(step));
        }
        // A failover that loses a write, with a write of a later holder after it, would be rare.
        // Therefore, every other trace has only one holder until the failover.
        if self.walk.seed.is_multiple_of(2) && self.walk.state.left.failovers > 0 {
            let loses = |standby: Database| self.walk.state.commits != standby.data;
            let others = |step: &Step| match step {
                Step::Grant(who) => *who == Who::A,
                Step::FailOver => self.walk.state.standby.is_some_and(loses),
                _ => true,
            };
            if steps.iter().any(others) {
                steps.retain(others);
            }
        }
        if !rare.is_empty() && self.walk.random.random_bool(0.7) {
            return rare.choose(&mut self.walk.random).copied();
        }
        steps.choose(&mut self.walk.random).copied()
    }

    /// Returns the holder whose transaction has locked the row.
    fn has_row(&self) -> Option<Who> {
        let has = |attempt| matches!(attempt, Attempt::Admitted | Attempt::Written(_));
        let mut all = Who::ALL.into_iter();
        all.find(|who| self.walk.state.holder(*who).attempts.into_iter().any(has))
    }

    /// Whether a newer holder can begin a single statement.
    fn is_sent_above(&self, who: Who) -> bool {
        let token = self.token_of(who);
        let mut holders = Who::HOLDERS.into_iter();
        self.walk.state.mode.at_once
            && token > self.max_token()
            && holders.any(|other| {
                let attempts = self.walk.state.holder(other).attempts;
                self.token_of(other) > token && attempts.contains(&Attempt::Sent)
            })
    }

    /// Returns the next step of the single statement, if it does not have to wait.
    pub(super) fn next_of_single(&self) -> Option<Step> {
        let &((who, request), _) = self.single.as_ref()?;
        let begun = || (!self.walk.state.is_open()).then_some(Step::RunStatement(who, request));
        match self.walk.state.attempt(who, request) {
            Attempt::Begun(_) => begun(),
            Attempt::GaveUp if self.walk.state.is_behind() => Some(Step::CatchUp),
            Attempt::GaveUp => Some(Step::Admit(who, request)),
            Attempt::Admitted => Some(Step::Write(who, request)),
            Attempt::Written(_) => Some(Step::Commit(who, request)),
            _ => None,
        }
    }
}
