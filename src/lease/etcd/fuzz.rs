//! What the fuzz targets reach of this store.

use serde::de::DeserializeOwned;

use super::{
    clock::ClockState,
    life::Log,
    line::Line,
    list::{read_cursor, write_cursor},
    messages::{
        AuthAnswer, Header, KeyValue, LeaseAnswer, RangeAnswer, Refusal, StatusAnswer, Streamed,
        TxnAnswer, WatchAnswer,
    },
    stored::{FoundLease, FoundPlace},
};
use crate::{epochs::Epoch, token::Token};

/// Reads an answer of the gateway as each call would, and what stands under its keys. Whether there is a lease, a usable
/// clock, or somebody in line.
pub(crate) fn answer(bytes: &[u8]) -> [bool; 3] {
    let mut found = [false; 3];
    if let Some(answer) = read::<TxnAnswer>(bytes) {
        let header = answer.header;
        for read in answer.reads() {
            range(&read, &header, &mut found);
        }
    }
    if let Some(answer) = read::<RangeAnswer>(bytes) {
        range(&answer, &answer.header, &mut found);
    }
    if let Some(status) = read::<StatusAnswer>(bytes) {
        let log = Log::read(&status.header, &status).expect("the same member");
        let lead = log.lead_reached(status.header.revision);
        assert!(!log.is_later_than(lead, status.header.revision));
    }
    if let Some(watched) = read::<Streamed<WatchAnswer>>(bytes) {
        let mut line = Line::default();
        for event in &watched.result.events {
            if let Some(lost) = line.apply(event, "line\0") {
                assert!(!line.has(&lost));
            }
            assert!(line.turn().is_none_or(|first| line.has(first)));
            found[2] |= line.turn().is_some();
        }
    }
    read::<Streamed<LeaseAnswer>>(bytes);
    read::<LeaseAnswer>(bytes);
    read::<AuthAnswer>(bytes);
    read::<Refusal>(bytes);
    found
}

fn read<T: DeserializeOwned>(bytes: &[u8]) -> Option<T> {
    serde_json::from_slice(bytes).ok()
}

fn range(answer: &RangeAnswer, header: &Header, found: &mut [bool; 3]) {
    for kv in &answer.kvs {
        let [is_lease, is_clock] = value(kv, header);
        found[0] |= is_lease;
        found[1] |= is_clock;
    }
}

/// Reads what a key has, whichever it is. Whether it is a lease, or a usable clock.
fn value(kv: &KeyValue, header: &Header) -> [bool; 2] {
    let lease = FoundLease::read(kv);
    if let Some(lease) = &lease {
        assert!(lease.token <= Token::MAX);
        let _ = lease.owner();
    }
    let _ = FoundPlace::read(kv);
    let clock = ClockState::judge(Some(kv), header, Log::default(), (1, 0), None);
    if let Some(clock) = clock.usable() {
        let n = header.revision.saturating_sub(clock.base);
        assert!(n < Epoch::SIZE - 1);
    }
    [lease.is_some(), clock.usable().is_some()]
}

/// Reads a cursor, and writes what was read.
pub(crate) fn cursor(text: &str) -> Option<String> {
    read_cursor(text).map(|last| write_cursor(&last))
}
