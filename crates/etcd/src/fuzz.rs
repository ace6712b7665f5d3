//! Entry points of the fuzz targets: one function for each kind of input. Each function panics if
//! an invariant does not hold.

use serde::de::DeserializeOwned;
use tower_fence::{epochs::Epoch, lease::backend::Seen};

use crate::{
    counter::{CounterState, CounterView, read_mark},
    error::Refusal,
    incarnation::Log,
    list::{read_cursor, write_cursor},
    messages::{
        AuthAnswer, Header, KeyValue, LeaseAnswer, StatusAnswer, Streamed, TxnAnswer, WatchAnswer,
    },
    stored::{FoundLease, FoundPosition},
    watched_queue::WatchedQueue,
};

/// Reads a response of the gateway.
pub fn answer(bytes: &[u8]) {
    found(bytes);
}

/// Reads the cursor of a list.
pub fn cursor(bytes: &[u8]) {
    let last = str::from_utf8(bytes).ok().and_then(read_cursor);
    if let Some(last) = last {
        assert_eq!(read_cursor(&write_cursor(&last)), Some(last));
    }
}

/// Reads a response, and the values of its keys, as each call would. Returns whether it contains a
/// lease, a counter whose tokens are valid, and a waiter.
fn found(bytes: &[u8]) -> [bool; 3] {
    let mut found = [false; 3];
    if let Some(answer) = read::<TxnAnswer>(bytes) {
        let header = answer.header;
        let kvs: Vec<_> = answer.reads().flat_map(|read| read.kvs).collect();
        for kv in &kvs {
            value(kv, &kvs, header, &mut found);
        }
    }
    if let Some(status) = read::<StatusAnswer>(bytes) {
        let _ = Log::read(&status.header, &status);
    }
    if let Some(watched) = read::<Streamed<WatchAnswer>>(bytes) {
        let mut queue = WatchedQueue::default();
        for event in &watched.result.events {
            queue.apply(event, b"lease");
            found[2] |= queue.turn().is_some();
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

/// Reads the value of a key as a value of each kind, and evaluates it as a counter in each
/// incarnation of `incarnations`.
fn value(kv: &KeyValue, incarnations: &[KeyValue], header: Header, found: &mut [bool; 3]) {
    let lease = FoundLease::read(kv);
    if let Some(lease) = &lease {
        let _ = lease.owner();
    }
    found[0] |= lease.is_some();
    let _ = FoundPosition::read(kv);
    for incarnation in incarnations {
        let view = CounterView {
            header,
            incarnation: Some(incarnation.clone()),
            counter: Some(kv.clone()),
            log: Log::default(),
        };
        match view.judge(&Seen::default()) {
            CounterState::Begun {
                counter,
                is_used_up,
            } => {
                let n = counter.counted(header.revision);
                assert_eq!(is_used_up, n >= Epoch::SIZE - 1);
                found[1] = true;
            }
            CounterState::Blank(blank) => assert!(read_mark(&blank.mark).is_some()),
            CounterState::Over(_) | CounterState::OtherSource(_) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use base64::{Engine, prelude::BASE64_STANDARD};
    use proptest::{
        collection::vec, prelude::*, strategy::ValueTree as _, test_runner::TestRunner,
    };

    use super::*;

    /// Generates the response to a transaction that reads the incarnation of etcd with a lease or a
    /// counter, or the report of a watch.
    fn answers() -> impl Strategy<Value = String> {
        let token = prop_oneof![
            any::<i64>().prop_map(|least| format!(r#"{{"new":{{"at_least":{least}}}}}"#)),
            any::<i64>().prop_map(|token| format!(r#"{{"kept":{token}}}"#)),
            Just(r#"{"new":{"at_least":0}}"#.to_owned()),
        ];
        let lease = (token, 0..3_i64, 0..9_i64).prop_map(|(token, epoch, base)| {
            format!(
                r##"{{"id":"#","ticket":1,"owner":"w","granted_at":1795000000,"ttl":3,"delay":0,"epoch":{epoch},"base":{base},"token":{token}}}"##
            )
        });
        let counter = (0..3_i64, 6..8_u64, any::<bool>()).prop_map(|(epoch, incarnation, begun)| {
            format!(
                r#"{{"source":"s","incarnation":{incarnation},"id":1,"epoch":{epoch},"begun":{begun}}}"#
            )
        });
        let number = || prop_oneof![4 => 0..12_i64, 1 => any::<i64>()];
        let stored =
            prop_oneof![4 => lease.boxed(), 4 => counter.boxed(), 1 => "[0-9]{0,5}|\\{\\}"];
        let read = (stored, number(), number()).prop_map(|(value, at, revision)| {
            let [value, incarnation] = [&value, r#"{"id":7,"cluster":7,"lead":null}"#]
                .map(|value| BASE64_STANDARD.encode(value));
            let kv = |value: &str| format!(r#"{{"key":"YQ==","value":"{value}","mod_revision":"{at}"}}"#);
            format!(
                r#"{{"header":{{"cluster_id":"7","revision":"{revision}"}},"responses":[{{"response_range":{{"kvs":[{},{}]}}}}]}}"#,
                kv(&incarnation),
                kv(&value)
            )
        });
        let event = ("|DELETE|PUT", "[ab]|lease", number()).prop_map(|(kind, key, since)| {
            let key = BASE64_STANDARD.encode(key);
            format!(r#"{{"type":"{kind}","kv":{{"key":"{key}","create_revision":"{since}"}}}}"#)
        });
        let watched = vec(event, 0..6)
            .prop_map(|events| format!(r#"{{"result":{{"events":[{}]}}}}"#, events.join(",")));
        prop_oneof![read, watched]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(1_000))]

        #[test]
        fn any_bytes_yield_an_answer_or_an_error(bytes in vec(any::<u8>(), 0..200)) {
            answer(&bytes);
        }

        #[test]
        fn answer_is_read_or_invalid(body in answers()) {
            answer(body.as_bytes());
        }

        #[test]
        fn cursor_is_read_as_it_is_written(text in "after-([A-Za-z0-9_-]{0,12}|\\PC{0,4})") {
            cursor(text.as_bytes());
        }
    }

    #[test]
    fn generated_answers_include_valid_ones() {
        let mut runner = TestRunner::deterministic();
        for n in 0..3 {
            let some = (0..2_000).filter(|_| {
                let body = answers().new_tree(&mut runner).unwrap().current();
                found(body.as_bytes())[n]
            });
            assert!(some.count() > 5);
        }
    }
}
