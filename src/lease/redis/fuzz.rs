//! Entry points for the fuzz targets of this store.

use std::time::Duration;

use super::{
    answer::{parse, unexpected},
    list::resource_of_key,
};
use crate::{
    epochs::{Epoch, partition_of},
    lease::backend::Reply,
};

/// Parses a reply of a script.
pub(crate) fn answer(words: Vec<String>) {
    match parse(words, Duration::ZERO) {
        Ok(Reply::Granted(granted)) => {
            let (_, n) = granted.counted.expect("the script says how far");
            assert!(granted.token.get() > 0 && (0..Epoch::SIZE).contains(&n));
        }
        Ok(_) => {}
        // The error does not quote the reply.
        Err(error) => assert_eq!(format!("{error:?}"), format!("{:?}", unexpected())),
    }
}

/// Parses a key that SCAN has found.
pub(crate) fn lease_key(key: &[u8]) {
    if let Some(resource) = resource_of_key("tower-fence:{", key.to_vec()) {
        let whole = format!(
            "tower-fence:{{{}}}:lease:{resource}",
            partition_of(&resource)
        );
        assert_eq!(whole.as_bytes(), key);
    }
}
