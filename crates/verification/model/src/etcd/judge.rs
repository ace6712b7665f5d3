//! The conclusions of an issuer from the answers of etcd.

use super::{
    Rule, Rules,
    server::{Row, Seen, Server},
    state::Needs,
};

/// The length of the log and the revision, as a member reports them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Status {
    log: i8,
    revision: u8,
}

impl Status {
    pub(super) fn of(etcd: &Server) -> Self {
        Self {
            log: etcd.log(),
            revision: etcd.revision,
        }
    }

    fn lead_over(self, revision: u8) -> i8 {
        self.log - i8::try_from(revision).expect("there are few revisions")
    }
}

/// The judgement of a row. If the row is not usable, an incarnation or an epoch must be written
/// first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Judgement {
    Usable(Row),
    NeedsIncarnation(Needs),
    NeedsEpoch(Needs),
}

/// Judges the row in an answer. A status, if there is one, shows whether etcd was restored.
pub(super) fn judge(rules: Rules, seen: &Seen, status: Option<Status>) -> Judgement {
    let lead = status.map(|status| match rules.has(Rule::LeadOfStatus) {
        true => status.lead_over(status.revision),
        false => status.lead_over(seen.revision),
    });
    let is_restored = |known: i8| lead.is_some_and(|lead| known > lead);
    let needs = Needs {
        incarnation: seen.incarnation.map_or(0, |incarnation| incarnation.id),
        row: seen.row.map_or(0, |row| row.written),
        lead: status.map_or(0, |status| status.lead_over(status.revision)),
        epoch: match rules.has(Rule::NewEpoch) {
            true => 0,
            false => seen.row.map_or(1, |row| row.epoch),
        },
    };
    if !rules.has(Rule::OneIncarnation) {
        return match seen.row {
            Some(row) if !is_restored(row.lead) => Judgement::Usable(row),
            _ => Judgement::NeedsEpoch(needs),
        };
    }
    let Some(incarnation) = seen
        .incarnation
        .filter(|incarnation| !is_restored(incarnation.lead))
    else {
        return Judgement::NeedsIncarnation(needs);
    };
    match seen.row {
        Some(row) if row.incarnation == incarnation.id || !rules.has(Rule::RowNamesIncarnation) => {
            Judgement::Usable(row)
        }
        _ => Judgement::NeedsEpoch(Needs { lead: 0, ..needs }),
    }
}
