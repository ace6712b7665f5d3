//! The participants, and the data of the database.

/// A holder, or a client without a grant. Holders are ordered by their grants.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq, PartialOrd, Ord)]
pub enum Who {
    A,
    B,
    C,
    Stranger,
}

use Who::{A, B, C, Stranger};

impl Who {
    pub const HOLDERS: [Self; 3] = [A, B, C];
    pub const ALL: [Self; 4] = [A, B, C, Stranger];

    const fn place(self) -> usize {
        self as usize
    }
}

/// A request of a holder. With single-use tokens, the second request repeats the first. Otherwise
/// it is another write.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub enum Request {
    First,
    Again,
}

impl Request {
    pub const ALL: [Self; 2] = [Self::First, Self::Again];
}

/// The number of times that each change is in the data. Each holder has two changes.
pub type Data = [u8; 6];

/// The forged token of a client without a grant.
pub const FORGED: u8 = 100;

/// The amount by which a failover moves all tokens up.
pub const MOVE: u8 = 10;

/// The choices that define a world: the kinds of reads, tokens and writes.
#[derive(Clone, Copy, Debug, Default, Hash, PartialEq, Eq)]
pub struct Mode {
    /// Whether grants are announced and reads are plain. Otherwise, reads are fenced.
    pub announced: bool,
    /// Whether tokens are single-use. Otherwise, they are reusable.
    pub single_use: bool,
    /// Whether the check and the write may be a single statement. Otherwise, they are a transaction
    /// of several statements.
    pub at_once: bool,
    /// Whether a holder writes back the value that it has read, with its change. Otherwise, its
    /// statement adds the change.
    pub writes_back: bool,
}

impl Mode {
    pub fn all() -> impl Iterator<Item = Self> {
        (0..16).map(|bits| Self {
            announced: bits & 1 != 0,
            single_use: bits & 2 == 0,
            at_once: bits & 4 != 0,
            writes_back: bits & 8 == 0,
        })
    }
}

/// The number of faults of each kind.
#[derive(Clone, Copy, Debug, Default, Hash, PartialEq, Eq)]
pub struct Faults {
    /// Second requests. A write is repeated if it had no answer or has failed.
    pub repetitions: u8,
    /// Handlers that fail.
    pub failures: u8,
    /// Crashes of the database.
    pub crashes: u8,
    /// Failovers to a standby that lacks the last transactions.
    pub failovers: u8,
    /// Requests of a client without a grant.
    pub strangers: u8,
}

/// The row of the fence.
#[derive(Clone, Copy, Debug, Default, Hash, PartialEq, Eq)]
pub struct Row {
    pub max_token: u8,
    pub version: u8,
    /// The timeline on which a token was last admitted.
    pub timeline: u8,
}

/// The committed data.
#[derive(Clone, Copy, Debug, Default, Hash, PartialEq, Eq)]
pub struct Database {
    pub row: Row,
    pub data: Data,
}

/// The progress of a holder before its write.
#[derive(Clone, Copy, Debug, Default, Hash, PartialEq, Eq)]
pub enum Stage {
    /// The holder waits for its grant.
    #[default]
    Idle,
    Granted,
    /// The fence has refused its grant or its read.
    Superseded,
    Announced,
    /// The fenced read of the holder was admitted, and its transaction has locked the row.
    Admitted,
    /// The holder has read, and its transaction is open.
    HasRead,
    /// The fenced read of the holder was answered, and its transaction is open. This occurs only if
    /// the answer does not wait for the COMMIT.
    AnsweredEarly,
    /// The holder can write.
    Ready,
}

impl Stage {
    /// Whether the transaction of a fenced read is open.
    pub const fn is_in_read(self) -> bool {
        matches!(self, Self::Admitted | Self::HasRead | Self::AnsweredEarly)
    }
}

/// The answer that a holder has received to its write.
#[derive(Clone, Copy, Debug, Default, Hash, PartialEq, Eq)]
pub enum Verdict {
    #[default]
    None,
    Done,
    Failed,
    Refused,
    /// The write succeeded, and a failover has lost it.
    Lost,
}

/// The progress of a request on the server.
#[derive(Clone, Copy, Debug, Default, Hash, PartialEq, Eq)]
pub enum Attempt {
    #[default]
    None,
    /// The request was sent, and may be delayed for any time.
    Sent,
    /// The single statement of the request has taken this snapshot, and waits for the row.
    Begun(Database),
    /// The single statement of the request has written nothing. The request continues with a
    /// transaction of several statements.
    GaveUp,
    /// The token of the request was compared, and `max_token` was not moved. This occurs only if
    /// the comparison and the move are separate statements.
    Compared,
    /// The transaction of the request has locked the row.
    Admitted,
    Written(Data),
    /// The COMMIT of the request is confirmed. Its answer was sent and has not arrived.
    Committed,
    /// A statement has failed, and the handler has ignored the error. The transaction has no locks
    /// any more.
    Aborted,
    /// The transaction of the request is rolled back. The fence is raised before the answer.
    Failing,
    /// The client of the request has disconnected, and its transaction still has the lock. This
    /// occurs only if the transaction is not ended.
    LeftOpen,
    Over,
}

#[derive(Clone, Copy, Debug, Default, Hash, PartialEq, Eq)]
pub struct Holder {
    /// The token; 0 before the grant.
    pub token: u8,
    pub stage: Stage,
    /// The data that it has read.
    pub read: Data,
    /// The answers to its writes.
    pub verdicts: [Verdict; 2],
    pub attempts: [Attempt; 2],
}

#[derive(Clone, Debug, Default, Hash, PartialEq, Eq)]
pub struct State {
    pub mode: Mode,
    pub left: Faults,
    pub committed: Database,
    /// The data of a standby that no longer replicates.
    pub standby: Option<Database>,
    /// The timeline of the server.
    pub timeline: u8,
    pub holders: [Holder; 4],
    /// The number of commits of each write.
    pub commits: Data,
    /// The highest token under which a request was answered.
    pub answered: u8,
    /// Whether a write or a fenced read was admitted after an answer under a newer token.
    pub older_admitted: bool,
    /// Whether a holder was refused, although there was no newer grant and its token was not used
    /// up.
    pub refused_for_nothing: bool,
}

impl State {
    pub fn new(mode: Mode, left: Faults) -> Self {
        let mut state = Self {
            mode,
            left,
            ..Self::default()
        };
        let stranger = state.holder_mut(Stranger);
        (stranger.token, stranger.stage) = (FORGED, Stage::Ready);
        state
    }

    pub fn holder(&self, who: Who) -> &Holder {
        &self.holders[who.place()]
    }

    pub fn holder_mut(&mut self, who: Who) -> &mut Holder {
        &mut self.holders[who.place()]
    }

    pub fn attempt(&self, who: Who, request: Request) -> Attempt {
        self.holder(who).attempts[request as usize]
    }

    pub fn set(&mut self, who: Who, request: Request, attempt: Attempt) {
        self.holder_mut(who).attempts[request as usize] = attempt;
    }

    pub fn attempts(&self) -> impl Iterator<Item = Attempt> {
        self.holders.iter().flat_map(|holder| holder.attempts)
    }

    /// Whether an open transaction has locked the data.
    pub fn data_is_locked(&self) -> bool {
        self.attempts()
            .any(|attempt| matches!(attempt, Attempt::Written(_)))
    }

    /// Whether a fenced read has locked the row.
    pub fn is_read(&self) -> bool {
        self.holders.iter().any(|holder| holder.stage.is_in_read())
    }

    /// Whether an open transaction of a write has locked the row. An aborted transaction has no
    /// lock.
    pub fn is_written(&self) -> bool {
        self.attempts().any(|attempt| {
            matches!(
                attempt,
                Attempt::Admitted | Attempt::Written(_) | Attempt::LeftOpen
            )
        })
    }

    /// Whether an open transaction has locked the row.
    pub fn is_open(&self) -> bool {
        self.is_read() || self.is_written()
    }

    /// Whether a request needs a lock that will never be released.
    pub fn waits_forever(&self) -> bool {
        let needs_lock = |attempt| {
            matches!(
                attempt,
                Attempt::Sent | Attempt::Begun(_) | Attempt::GaveUp | Attempt::Failing
            )
        };
        let is_left = |attempt| attempt == Attempt::LeftOpen;
        self.attempts().any(is_left) && self.attempts().any(needs_lock)
    }

    /// Whether no token has been admitted on the row since a failover.
    pub fn is_behind(&self) -> bool {
        self.committed.row.timeline != self.timeline
    }

    /// Records an answer under this token.
    pub fn answer(&mut self, token: u8) {
        self.answered = self.answered.max(token);
    }

    /// Returns the index of the write that a request executes.
    pub const fn write_of(&self, request: Request) -> usize {
        match self.mode.single_use {
            true => 0,
            false => request as usize,
        }
    }

    /// Returns the index of the change of a write in the data.
    pub const fn place(who: Who, write: usize) -> usize {
        who.place() * 2 + write
    }

    /// Returns the data with the change of a request.
    pub fn change(&self, who: Who, request: Request, mut data: Data) -> Data {
        data[Self::place(who, self.write_of(request))] += 1;
        data
    }

    pub fn verdict(&self, who: Who, request: Request) -> Verdict {
        self.holder(who).verdicts[self.write_of(request)]
    }

    pub fn verdict_mut(&mut self, who: Who, request: Request) -> &mut Verdict {
        let write = self.write_of(request);
        &mut self.holder_mut(who).verdicts[write]
    }

    pub fn count_commit(&mut self, who: Who, request: Request) {
        self.commits[Self::place(who, self.write_of(request))] += 1;
        self.older_admitted |= self.holder(who).token < self.answered;
    }
}
