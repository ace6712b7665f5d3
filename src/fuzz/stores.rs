//! What comes to the lease stores: cursors of lists, which a client sends back, and the answers of servers.

use super::lines;
use crate::lease::fuzz;

/// A cursor of the embedded store, which has two parts.
pub fn cursor(bytes: &[u8]) {
    if let Ok(text) = std::str::from_utf8(bytes) {
        let again = fuzz::memory::cursor;
        if let Some(written) = again(text) {
            assert_eq!(again(&written).as_ref(), Some(&written));
        }
    }
}

/// An answer of a script, a word for each line; the keys that a SCAN has found.
pub fn redis_answer(bytes: &[u8]) {
    let words = lines(bytes).into_iter();
    let words = words.map(|line| String::from_utf8_lossy(line).into_owned());
    fuzz::redis::answer(words.collect());
    for line in lines(bytes) {
        fuzz::redis::lease_key(line);
    }
}
