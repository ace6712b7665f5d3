//! [`LiveTokens`]: the lowest tokens of held leases. The issuer provides them. The fence uses them
//! to keep the rows of those leases when it removes idle rows.

use std::fmt;

use crate::{
    epochs::partition_of,
    token::{Resource, Token},
};

/// Lowest token that is in use, for each of the 256 partitions of resources.
///
/// [`live_tokens`](crate::lease::live_tokens) reads this value from a lease store, and
/// [`Fence::remove_idle_below`](crate::Fence::remove_idle_below) keeps the rows whose tokens are
/// not below the value of their partition. The default value contains no tokens.
#[derive(Clone)]
pub struct LiveTokens {
    lowest: [Option<Token>; 256],
    /// The highest token that another issuer is known to have granted.
    pub(crate) granted: Option<Token>,
}

impl LiveTokens {
    /// Sets the highest token that an issuer other than this crate's is known to have granted. The
    /// tokens of that issuer must increase across all resources. Rows with higher tokens are kept,
    /// because such tokens may be forged.
    #[must_use]
    pub const fn granted_up_to(mut self, token: Token) -> Self {
        self.granted = Some(token);
        self
    }

    /// Adds a token that is in use.
    pub fn add(&mut self, resource: &Resource, token: Token) {
        let lowest = &mut self.lowest[usize::from(partition_of(resource))];
        *lowest = Some(lowest.map_or(token, |lowest| lowest.min(token)));
    }

    #[cfg(feature = "_fence")]
    pub(crate) const fn lowest(&self, partition: u8) -> Option<Token> {
        self.lowest[partition as usize]
    }
}

impl Default for LiveTokens {
    fn default() -> Self {
        Self {
            lowest: [None; 256],
            granted: None,
        }
    }
}

impl fmt::Debug for LiveTokens {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let known = self.lowest.iter().enumerate();
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
