//! Who there is, and what the database has.

/// A holder, by the order of the grants; or somebody who never got a grant.
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

/// A request of a holder. Where tokens write once, the second one repeats the first; otherwise it is another write.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub enum Request {
    First,
    Again,
}

impl Request {
    pub const ALL: [Self; 2] = [Self::First, Self::Again];
}

/// How often each change is in the data: two of each holder.
pub type Data = [u8; 6];

/// The token of a stranger, who has made it up.
pub const FORGED: u8 = 100;

/// By how much a failover moves all tokens up.
pub const MOVE: u8 = 10;

/// How the holders go about it.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub struct Mode {
    /// Grants are announced, and reads plain; otherwise reads are fenced.
    pub announced: bool,
    /// Tokens write once; otherwise again and again.
    pub single_use: bool,
    /// Check and write may be one statement; otherwise they are a transaction of several.
    pub at_once: bool,
    /// A holder writes back what it has read, with its change; otherwise its statement adds the change.
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

/// How often something may go wrong.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub struct Faults {
    /// Second requests. Of a write that is repeated nothing was heard, or it has failed.
    pub repetitions: u8,
    /// Handlers that fail.
    pub failures: u8,
    /// Crashes of the database.
    pub crashes: u8,
    /// Failovers to a standby that lacks the last transactions.
    pub failovers: u8,
    /// Requests of a stranger.
    pub strangers: u8,
}

impl Faults {
    pub const NONE: Self = Self {
        repetitions: 0,
        failures: 0,
        crashes: 0,
        failovers: 0,
        strangers: 0,
    };
}

/// The row of the fence.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub struct Row {
    pub max_token: u8,
    pub version: u8,
    /// The timeline on which it was admitted last.
    pub history: u8,
}

/// What is committed.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub struct Database {
    pub row: Row,
    pub data: Data,
}

/// How far a holder is before its write.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub enum Stage {
    /// It waits for its grant.
    Idle,
    Granted,
    /// Its grant was refused by the fence, or its read.
    Outranked,
    Announced,
    /// A fenced read was admitted, and its transaction has the lock of the row.
    Admitted,
    /// It has read, and its transaction is open.
    HasRead,
    /// It was answered, and its transaction is open. Only where COMMIT is not waited for.
    AnsweredEarly,
    /// It can write.
    Ready,
}

impl Stage {
    /// Whether the transaction of a fenced read is open.
    pub const fn is_in_read(self) -> bool {
        matches!(self, Self::Admitted | Self::HasRead | Self::AnsweredEarly)
    }
}

/// What a holder was told about its write.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub enum Verdict {
    None,
    Done,
    Failed,
    Refused,
    /// It was done, and lost in a failover.
    Lost,
}

/// A request on the server.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub enum Attempt {
    None,
    /// On its way, perhaps for long.
    Sent,
    /// The single statement has its snapshot, and waits for the row.
    Begun(Database),
    /// The single statement has found nothing to write: on to a transaction of several.
    GaveUp,
    /// Its token was compared, and nothing else. Only where check and move are two statements.
    Compared,
    /// In a transaction, which has the lock of the row.
    Admitted,
    Written(Data),
    /// Its COMMIT is confirmed. Its answer is on the way.
    Committed,
    /// A statement of the handler has failed, which swallowed that. It has no lock any more.
    Aborted,
    /// Rolled back. The fence is to be raised before the answer.
    Failing,
    /// Its client has gone away, and the transaction has its lock still. Only where that is not ended.
    LeftOpen,
    Over,
}

#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub struct Holder {
    /// 0 before the grant.
    pub token: u8,
    pub stage: Stage,
    /// What it has read.
    pub read: Data,
    /// On each of its writes.
    pub verdicts: [Verdict; 2],
    pub attempts: [Attempt; 2],
}

#[derive(Clone, Debug, Hash, PartialEq, Eq)]
pub struct State {
    pub mode: Mode,
    pub left: Faults,
    pub committed: Database,
    /// What the standby has, where that does not follow any more.
    pub standby: Option<Database>,
    /// The timeline of the server.
    pub history: u8,
    pub holders: [Holder; 4],
    /// How often each write was committed.
    pub commits: Data,
    /// The highest token under which something was answered.
    pub answered: u8,
    /// Somebody wrote although something was answered under a newer token, or was admitted for a read.
    pub older_admitted: bool,
    /// Somebody was refused although nobody newer was there, and its token not used up.
    pub refused_for_nothing: bool,
}

impl State {
    pub fn new(mode: Mode, left: Faults) -> Self {
        let holder = |token, stage| Holder {
            token,
            stage,
            read: [0; 6],
            verdicts: [Verdict::None; 2],
            attempts: [Attempt::None; 2],
        };
        let idle = holder(0, Stage::Idle);
        let row = Row {
            max_token: 0,
            version: 0,
            history: 0,
        };
        let empty = Database { row, data: [0; 6] };
        Self {
            mode,
            left,
            committed: empty,
            standby: None,
            history: 0,
            holders: [idle, idle, idle, holder(FORGED, Stage::Ready)],
            commits: [0; 6],
            answered: 0,
            older_admitted: false,
            refused_for_nothing: false,
        }
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

    /// Whether an open transaction has the data's lock.
    pub fn data_is_locked(&self) -> bool {
        self.attempts()
            .any(|attempt| matches!(attempt, Attempt::Written(_)))
    }

    /// Whether a fenced read has the row's lock.
    pub fn is_read(&self) -> bool {
        self.holders.iter().any(|holder| holder.stage.is_in_read())
    }

    /// Whether the transaction of a write is open that has the row's lock. One that was aborted has it no more.
    pub fn is_written(&self) -> bool {
        self.attempts().any(|attempt| {
            matches!(
                attempt,
                Attempt::Admitted | Attempt::Written(_) | Attempt::LeftOpen
            )
        })
    }

    /// Whether a transaction is open that has the row's lock.
    pub fn is_open(&self) -> bool {
        self.is_read() || self.is_written()
    }

    /// Whether somebody needs a lock that nobody will ever let go.
    pub fn waits_for_nobody(&self) -> bool {
        let needs_lock = |attempt| {
            matches!(
                attempt,
                Attempt::Sent | Attempt::Begun(_) | Attempt::GaveUp | Attempt::Failing
            )
        };
        let is_left = |attempt| attempt == Attempt::LeftOpen;
        self.attempts().any(is_left) && self.attempts().any(needs_lock)
    }

    /// Whether the row was not admitted on since a failover.
    pub fn is_behind(&self) -> bool {
        self.committed.row.history != self.history
    }

    /// Something was answered under this token.
    pub fn answer(&mut self, token: u8) {
        self.answered = self.answered.max(token);
    }

    /// Which of a holder's writes a request is for.
    pub const fn write_of(&self, request: Request) -> usize {
        match self.mode.single_use {
            true => 0,
            false => request as usize,
        }
    }

    /// Where the change of a write is in the data.
    pub const fn place(who: Who, write: usize) -> usize {
        who.place() * 2 + write
    }

    /// What a request makes of the data.
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
