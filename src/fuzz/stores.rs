//! Target for the replies of Redis.

use super::lines;
use crate::lease::fuzz;

/// Parses a reply of a script, and keys found by SCAN.
///
/// Each line of the input is a word of the reply, and is also parsed as a key.
pub fn redis_answer(bytes: &[u8]) {
    let words = lines(bytes).into_iter();
    let words = words.map(|line| String::from_utf8_lossy(line).into_owned());
    fuzz::answer(words.collect());
    for line in lines(bytes) {
        fuzz::lease_key(line);
    }
}
