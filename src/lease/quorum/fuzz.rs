//! What the fuzz targets reach of this store.

use super::answer::{Answer, Clock, Taken};
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
