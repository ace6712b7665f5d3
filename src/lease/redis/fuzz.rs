//! Fuzz target for the replies of Redis.

use std::time::Duration;

use super::{
    answer::{parse, unexpected},
    list::resource_of_key,
};
use crate::{epochs::partition_of, lease::backend::Reply};

/// Parses a reply of a script, and keys found by SCAN.
///
/// Each line of the input is a word of the reply, and is also parsed as a key.
pub fn redis_answer(bytes: &[u8]) {
    is_granted(bytes);
    for key in lines(bytes) {
        lease_key(key);
    }
}

fn lines(bytes: &[u8]) -> impl Iterator<Item = &[u8]> {
    bytes.split(|byte| *byte == b'\n')
}

/// Parses a reply of a script. Returns whether it grants a lease.
pub(crate) fn is_granted(bytes: &[u8]) -> bool {
    let words = lines(bytes).map(|line| String::from_utf8_lossy(line).into_owned());
    match parse(words.collect(), Duration::ZERO) {
        Ok(reply) => matches!(reply, Reply::Granted(_)),
        Err(error) => {
            // The error does not quote the reply.
            assert_eq!(format!("{error:?}"), format!("{:?}", unexpected()));
            false
        }
    }
}

fn lease_key(key: &[u8]) {
    if let Some(resource) = resource_of_key("tower-fence:{", key.to_vec()) {
        let whole = format!(
            "tower-fence:{{{}}}:lease:{resource}",
            partition_of(&resource)
        );
        assert_eq!(whole.as_bytes(), key);
    }
}
