//! What the fuzz targets reach of this store.

use std::time::Duration;

use super::{
    answer::{Answer, Clock, Taken},
    list::Cursor,
    nodes::Nodes,
};
use crate::{epochs::Epoch, lease::redis::unexpected};

/// Reads an answer of a script.
pub(crate) fn answer(words: Vec<String>) {
    match Answer::parse(words) {
        Ok(Answer::Taken(Taken { clock, .. }) | Answer::Renewed { clock, .. }) => {
            let Clock { epoch, n, .. } = clock;
            assert!(Epoch::new(epoch).is_ok() && (0..Epoch::SIZE).contains(&n));
        }
        Ok(_) => {}
        // It quotes nothing.
        Err(error) => assert_eq!(format!("{error:?}"), format!("{:?}", unexpected())),
    }
}

/// Reads a cursor, and writes what was read.
pub(crate) fn cursor(text: &str) -> Option<String> {
    let urls = [
        "redis://127.0.0.1",
        "redis://127.0.0.2",
        "redis://127.0.0.3",
    ];
    let nodes = Nodes::new(&urls, Duration::from_secs(1), "tower-fence").ok()?;
    let cursor = Cursor::parse(text, &nodes).ok()?;
    Some(cursor.to_string())
}
