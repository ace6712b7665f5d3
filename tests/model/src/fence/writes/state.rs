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

/// A request for the write of a holder, or its repetition.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub enum Request {
    First,
    Again,
}

impl Request {
    pub const ALL: [Self; 2] = [Self::First, Self::Again];
}

/// How often the change of each holder is in the data.
pub type Data = [u8; 3];

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
    /// Requests that are sent once more, since nothing was heard of the first, or it failed.
    pub repetitions: u8,
    /// Handlers that fail.
    pub failures: u8,
    /// Crashes of the database.
    pub crashes: u8,
    /// Failovers to a standby that lacks the last transaction.
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
    /// The time line on which it was admitted last.
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
    /// A fenced read has looked at the row, and has to raise it if it still has this version.
    Looked(Option<u8>),
    /// It has read, and the row is to be raised now.
    HasRead(u8),
    /// Somebody has written meanwhile. The row was raised, and it reads once more.
    Overtaken,
    /// It can write.
    Ready,
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
    /// A statement of the handler has failed, which swallowed that. It has no lock any more.
    Aborted,
    /// Rolled back. The fence is to be raised before the answer.
    Failing,
    Over,
}

#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub struct Holder {
    /// 0 before the grant.
    pub token: u8,
    pub stage: Stage,
    /// What it has read.
    pub read: Data,
    pub verdict: Verdict,
    pub attempts: [Attempt; 2],
}

#[derive(Clone, Debug, Hash, PartialEq, Eq)]
pub struct State {
    pub mode: Mode,
    pub left: Faults,
    pub committed: Database,
    /// The same without the last transaction.
    pub standby: Database,
    /// The time line of the server.
    pub history: u8,
    pub holders: [Holder; 4],
    /// How often each holder's write was committed.
    pub commits: Data,
    /// The highest token under which something was answered.
    pub answered: u8,
    /// Somebody wrote although something was answered under a newer token.
    pub older_wrote: bool,
    /// Somebody was refused although nobody newer was there, and its token not used up.
    pub refused_for_nothing: bool,
}

impl State {
    pub fn new(mode: Mode, left: Faults) -> Self {
        let holder = |token, stage| Holder {
            token,
            stage,
            read: [0; 3],
            verdict: Verdict::None,
            attempts: [Attempt::None; 2],
        };
        let idle = holder(0, Stage::Idle);
        let row = Row {
            max_token: 0,
            version: 0,
            history: 0,
        };
        let empty = Database { row, data: [0; 3] };
        Self {
            mode,
            left,
            committed: empty,
            standby: empty,
            history: 0,
            holders: [idle, idle, idle, holder(FORGED, Stage::Ready)],
            commits: [0; 3],
            answered: 0,
            older_wrote: false,
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

    /// Whether a transaction is open that has the row's lock. One that was aborted has it no more.
    pub fn is_open(&self) -> bool {
        self.attempts()
            .any(|attempt| matches!(attempt, Attempt::Admitted | Attempt::Written(_)))
    }

    /// Something was answered under this token.
    pub fn answer(&mut self, token: u8) {
        self.answered = self.answered.max(token);
    }

    /// A transaction commits, and the standby does not have it yet.
    pub fn commit(&mut self, committed: Database) {
        self.standby = self.committed;
        self.committed = committed;
    }

    /// What this holder's change makes of the data.
    pub fn change(who: Who, mut data: Data) -> Data {
        data[who.place()] += 1;
        data
    }

    pub fn count_commit(&mut self, who: Who) {
        self.commits[who.place()] += 1;
        self.older_wrote |= self.holder(who).token < self.answered;
    }

    pub fn commits_of(&self, who: Who) -> u8 {
        self.commits[who.place()]
    }

    pub fn changes_of(&self, who: Who) -> u8 {
        self.committed.data[who.place()]
    }
}
