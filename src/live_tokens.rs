//! Where the two sides meet once more: the lock side knows which leases are held, the resource side removes rows
//! whose tokens nobody has any more.

use std::fmt;

use crate::{
    epochs::partition_of,
    token::{Resource, Token},
};

/// The lowest tokens that may be in use, one for each of the 256 partitions of resources.
///
/// A lease store that lists its leases says them ([`Operate::live_tokens`](crate::lease::Operate::live_tokens)), and
/// [`Fence::remove_idle_below`](crate::Fence::remove_idle_below) spares them. By default, nothing is known.
#[derive(Clone)]
pub struct LiveTokens([Option<Token>; 256]);

impl LiveTokens {
    /// No token below this one is in use, on any resource: what an issuer has surely granted, where its tokens
    /// grow over all resources.
    #[must_use]
    pub const fn not_below(token: Token) -> Self {
        Self([Some(token); 256])
    }

    /// This token is in use.
    pub fn add(&mut self, resource: &Resource, token: Token) {
        let lowest = &mut self.0[usize::from(partition_of(resource))];
        *lowest = Some(lowest.map_or(token, |lowest| lowest.min(token)));
    }

    #[cfg(feature = "_fence")]
    pub(crate) const fn lowest(&self, partition: u8) -> Option<Token> {
        self.0[partition as usize]
    }
}

impl Default for LiveTokens {
    fn default() -> Self {
        Self([None; 256])
    }
}

impl fmt::Debug for LiveTokens {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let known = self.0.iter().enumerate();
        let known = known.filter_map(|(partition, lowest)| Some((partition, (*lowest)?)));
        f.debug_map().entries(known).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lowest_token_of_a_partition_counts() {
        let mut live = LiveTokens::default();
        let resource = Resource::new("sku-1").unwrap();
        for token in [7, 5, 9] {
            live.add(&resource, Token::new(token).unwrap());
        }
        // The partition of sku-1.
        assert_eq!(format!("{live:?}"), "{110: Token(5)}");
    }
}
