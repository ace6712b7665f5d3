//! The rules of a quorum of Redis nodes, each of which can be left out: of the scripts of the store, whose text is
//! that of the crate, or by the clients that [`quorum`](super) plays.

macro_rules! scripts {
    ($($name:ident: $file:literal),* $(,)?) => {
        $(pub const $name: Script = Script {
            file: $file,
            text: concat!(
                include_str!("../../../../src/lease/quorum/lua/node.lua"),
                include_str!(concat!("../../../../src/lease/quorum/lua/", $file)),
            ),
        };)*

        /// All of them.
        const SCRIPTS: &[Script] = &[$($name),*];
    };
}

/// A script as the crate sends it.
#[derive(Clone, Copy)]
pub struct Script {
    file: &'static str,
    text: &'static str,
}

scripts! {
    ABANDON: "abandon.lua",
    CHECK: "check.lua",
    END: "end.lua",
    LOOK: "look.lua",
    RENEW: "renew.lua",
    SEAL: "seal.lua",
    TAKE: "take.lua",
}

/// What may not be left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// A token is counted from the highest clock of a majority.
    HighestOfMajority,
    /// A clock counts under the history in which it was written.
    HistoryWhenTaking,
    /// Another one is blank from the first time on that it is met.
    BlankUnderNewHistory,
    /// A key keeps its token under the history in which it was sealed.
    HistoryOfStoredToken,
    /// A clock that was lost is not one that has counted nothing.
    LostIsNotZero,
    /// Nor is it passed over where another one is usable.
    LostIsNotPassedOver,
    /// The epoch comes from the database.
    EpochFromDatabase,
    /// And was not asked for ahead.
    EpochAskedNow,
    /// A newer attempt of a lease is not followed by an older one.
    NewerAttemptsOnly,
    /// To take is not to be granted.
    Seal,
    /// Nor is it to be sealed on a few nodes.
    SealOnMajority,
    /// Only the nodes are sealed whose clocks were counted.
    SealWhereCounted,
    /// One attempt chooses one token.
    OneChoice,
    /// It is above the one that the lease has.
    AboveStoredToken,
    /// A seal fits to the lease that was taken.
    LeaseWhenSealing,
    /// And to its stamp, not to the attempt alone.
    StampBesideAttempt,
    /// Still less to the lease id alone.
    StampBesideLeaseId,
    /// A seal fits to the history in which the key was taken.
    HistoryWhenSealing,
    /// And to the incarnation.
    Incarnation,
    /// Also where the key is older than the clock.
    IncarnationOfClock,
    /// No seal turns a clock back.
    HigherOfBoth,
    /// Nor does a higher number of an older epoch.
    NumbersOfOneEpoch,
    /// A renewal needs a token on each node.
    RenewalNeedsToken,
    /// And the same one.
    RenewalNeedsSameToken,
    /// And the history in which it was sealed.
    RenewalNeedsHistory,
    /// So does one for another token.
    NewTokenNeedsHistory,
    /// A release ends what was found.
    ReleaseOfWhatWasFound,
    /// Cleaning up ends keys of that attempt.
    CleanUpOfAttempt,
    /// And none that has the token of an earlier one.
    CleanUpOfToken,
    /// Nor one that has the same token from an earlier one.
    CleanUpWhereSealed,
    /// A node has no replicas, and is none.
    NodesStandAlone,
}

/// A place in a script, and what stands there without a rule.
type Cut = (Script, &'static str, &'static str);

const OWN: &str = "now.own = now.history and found[3] == now.history and now.incarnation";
const STAMP: &str = "
  and lease.history == ARGV[7] and lease.incarnation == ARGV[8] and lease.serial == ARGV[9]";
const ATTEMPT_AND_STAMP: &str = " and is_attempt(lease, ARGV[5], ARGV[6])
  and lease.history == ARGV[7] and lease.incarnation == ARGV[8] and lease.serial == ARGV[9]";

impl Rule {
    /// What it is in the scripts; nothing where it is the client's.
    fn cuts(self) -> Vec<Cut> {
        let is_older =
            "theirs > mine or (theirs == mine and tonumber(lease.nonce) > tonumber(nonce))";
        let is_higher = "not now.n or epoch > now.epoch or (epoch == now.epoch and n > now.n)";
        let of_one_epoch = "(epoch == now.epoch and n > now.n)";
        let of_attempt = " or not is_attempt(lease, ARGV[5], ARGV[6])";
        let of_token = "(lease.token ~= '' and lease.token ~= ARGV[7])";
        let has_value = "redis.call('GET', LEASE) ~= ARGV[5]";
        let has_id = "not current() or current().id ~= string.match(ARGV[5], '^[^:]*')";
        let of_clock = " or now.incarnation ~= ARGV[8]";
        match self {
            Self::HistoryWhenTaking => vec![
                (TAKE, OWN, "now.own = now.incarnation"),
                (SEAL, OWN, "now.own = now.incarnation"),
            ],
            Self::BlankUnderNewHistory => vec![(TAKE, "redis.call('DEL', CLOCK)", "")],
            Self::HistoryOfStoredToken => {
                vec![(
                    TAKE,
                    "if same_history then\n  taken.token",
                    "if lease then\n  taken.token",
                )]
            }
            Self::NewerAttemptsOnly => vec![(TAKE, is_older, "false")],
            Self::NewTokenNeedsHistory => {
                vec![(TAKE, "not same_history or lease.token == ''", "false")]
            }
            Self::LeaseWhenSealing => vec![(SEAL, "not is_taken or ", "")],
            Self::StampBesideAttempt => vec![(SEAL, STAMP, "")],
            Self::StampBesideLeaseId => vec![(SEAL, ATTEMPT_AND_STAMP, "")],
            Self::HistoryWhenSealing => vec![
                (SEAL, " or not now.own", ""),
                (SEAL, " or now.history ~= ARGV[7]", ""),
            ],
            Self::Incarnation => vec![
                (SEAL, " and lease.incarnation == ARGV[8]", ""),
                (SEAL, of_clock, ""),
            ],
            Self::IncarnationOfClock => vec![(SEAL, of_clock, "")],
            Self::HigherOfBoth => vec![(SEAL, is_higher, "true")],
            Self::NumbersOfOneEpoch => vec![(SEAL, of_one_epoch, "n > now.n")],
            Self::RenewalNeedsToken => vec![(RENEW, " or lease.token == ''", "")],
            Self::RenewalNeedsHistory => vec![(RENEW, " or lease.history ~= now.history", "")],
            Self::ReleaseOfWhatWasFound => vec![(END, has_value, has_id)],
            Self::CleanUpOfAttempt => vec![(ABANDON, of_attempt, "")],
            Self::CleanUpOfToken => vec![(ABANDON, of_token, "false")],
            Self::NodesStandAlone => {
                let alone = |script: &Script| (*script, "if not now.alone then", "if false then");
                SCRIPTS.iter().map(alone).collect()
            }
            _ => vec![],
        }
    }
}

impl Script {
    /// Its text, but for this rule.
    pub fn without(self, rule: Option<Rule>) -> String {
        let mut text = self.text.to_owned();
        let cuts = rule.map_or_else(Vec::new, Rule::cuts);
        for (_, line, other) in cuts.iter().filter(|cut| cut.0.file == self.file) {
            let found = text.matches(line).count();
            assert_eq!(found, 1, "{rule:?} is not in {} as {line:?}", self.file);
            text = text.replace(line, other);
        }
        text
    }
}
