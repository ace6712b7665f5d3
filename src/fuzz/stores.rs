//! Targets for the input of the lease stores: cursors, which clients send, and replies of Redis.

use super::lines;
use crate::lease::fuzz;

/// Parses a cursor of the in-memory store.
pub fn cursor(bytes: &[u8]) {
    if let Ok(text) = std::str::from_utf8(bytes) {
        let again = fuzz::memory::cursor;
        if let Some(written) = again(text) {
            assert_eq!(again(&written).as_ref(), Some(&written));
        }
    }
}

/// Parses a reply of a script, and keys found by SCAN.
///
/// Each line of the input is a word of the reply, and is also parsed as a key.
pub fn redis_answer(bytes: &[u8]) {
    let words = lines(bytes).into_iter();
    let words = words.map(|line| String::from_utf8_lossy(line).into_owned());
    fuzz::redis::answer(words.collect());
    for line in lines(bytes) {
        fuzz::redis::lease_key(line);
    }
}
