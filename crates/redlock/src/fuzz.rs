//! Fuzz target for the replies of the nodes.

use crate::answer::{Answer, unexpected};

/// Parses a reply of a script.
///
/// Each line of the input is a word of the reply.
pub fn answer(bytes: &[u8]) {
    grants(bytes);
}

/// Parses a reply of a script. Returns the number of grants that it contains.
fn grants(bytes: &[u8]) -> usize {
    let words = bytes.split(|byte| *byte == b'\n');
    let words: Vec<_> = words
        .map(|word| String::from_utf8_lossy(word).into_owned())
        .collect();
    match Answer::parse(&words) {
        Ok(Answer::Found(found)) => {
            let found = found.iter().flatten();
            found.filter(|lease| lease.grant().is_some()).count()
        }
        Ok(_) => 0,
        Err(error) => {
            // The error does not quote the reply.
            assert_eq!(format!("{error:?}"), format!("{:?}", unexpected()));
            0
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::{
        collection::vec, prelude::*, strategy::ValueTree as _, test_runner::TestRunner,
    };

    use super::*;

    /// Generates replies to a read of up to two leases.
    fn found() -> impl Strategy<Value = String> {
        let number = "[0-9]{1,20}";
        let attempt = (number, number).prop_map(|(number, ticket)| format!("{number}\n{ticket}"));
        let lease = (attempt, "[0-9]{0,16}", "[01]", "w?", "-?[0-9]{0,5}").prop_map(
            |(attempt, token, mark, owner, left)| {
                format!("\nv\n#id\n{attempt}\n{token}\n{mark}\n{owner}\n{left}")
            },
        );
        vec(lease, 0..3).prop_map(|leases| format!("found{}", leases.concat()))
    }

    /// Generates replies that begin with a known word.
    fn other() -> impl Strategy<Value = String> {
        let first = "taken|sealed|held|older|renewed|node|source|nodes|found";
        let words = vec("-?[0-9]{0,20}|1|\\PC{0,4}", 0..9);
        (first, words).prop_map(|(first, words)| format!("{first}\n{}", words.join("\n")))
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(1_000))]

        #[test]
        fn any_bytes_are_a_reply_or_an_error(bytes in vec(any::<u8>(), 0..200)) {
            answer(&bytes);
        }

        #[test]
        fn reply_is_parsed_or_refused(reply in prop_oneof![found(), other()]) {
            answer(reply.as_bytes());
        }
    }

    #[test]
    fn generated_replies_include_grants() {
        let mut runner = TestRunner::deterministic();
        let replies = (0..2_000).map(|_| found().new_tree(&mut runner).unwrap().current());
        let with_grants = replies.filter(|reply| grants(reply.as_bytes()) > 0);
        assert!(with_grants.count() > 5);
    }
}
