//! [`Verification`]: the rules by which a layer decides whether the issuer has signed a token.

use super::{refusal::Refusal, report};
use crate::{
    events,
    header::FencingToken,
    metrics,
    token_keys::{Forged, TokenKeys},
};

/// Rules for verifying tokens, for [`FenceLayer::verify_with`](super::FenceLayer::verify_with).
///
/// To migrate a service to signed tokens, first make verification optional in the layers, then let
/// the issuers sign. When all leases and idempotency records from before that time have ended (see
/// [the guide](crate::guide::signed_tokens)), and `tower_fence_unsigned_tokens_total` no longer
/// increases, require signatures. Until then, a client can still forge a token by omitting the
/// signature.
///
/// ```
/// use tower_fence::{TokenKey, TokenKeys, layer::Verification};
///
/// let keys = TokenKeys::new([TokenKey::random("k1")?])?;
/// let for_now = Verification::optional(keys.clone());
/// let then = Verification::required(keys); // or the keys themselves
/// # let _ = (for_now, then);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct Verification {
    keys: TokenKeys,
    required: bool,
}

impl Verification {
    /// Requires a signature on every token. Unsigned tokens are refused.
    #[must_use]
    pub const fn required(keys: TokenKeys) -> Self {
        Self {
            keys,
            required: true,
        }
    }

    /// Accepts unsigned tokens. A token with neither a key nor a MAC is accepted, and counted in
    /// `tower_fence_unsigned_tokens_total`. Every other token is verified.
    #[must_use]
    pub const fn optional(keys: TokenKeys) -> Self {
        Self {
            keys,
            required: false,
        }
    }

    pub(super) fn verify(&self, tokens: &[FencingToken]) -> Result<(), Refusal> {
        for token in tokens {
            match self.keys.verify(token) {
                Ok(_) => {}
                Err(Forged::Unsigned) if !self.required => {
                    metrics::count("tower_fence_unsigned_tokens_total");
                    report::unsigned(token);
                }
                Err(why) => {
                    if matches!(why, Forged::UnknownKey(_)) {
                        metrics::count("tower_fence_unknown_token_keys_total");
                    }
                    report::forged(token, &why);
                    events::forged(token.resource.as_ref(), token.token);
                    return Err(Refusal::Forged(why));
                }
            }
        }
        Ok(())
    }
}

impl From<TokenKeys> for Verification {
    fn from(keys: TokenKeys) -> Self {
        Self::required(keys)
    }
}

#[cfg(all(test, feature = "metrics"))]
mod tests {
    use metrics_exporter_prometheus::PrometheusBuilder;

    use super::*;
    use crate::{
        token::{Resource, Token},
        token_keys::TokenKey,
    };

    #[test]
    fn unknown_keys_and_unsigned_tokens_are_counted_apart() {
        let keys = |id| TokenKeys::new([TokenKey::random(id).unwrap()]).unwrap();
        let (known, unknown) = (keys("k1"), keys("k2"));
        let signed = |by: &TokenKeys| by.sign(&Resource::new("a").unwrap(), Token::MIN);
        let unsigned = FencingToken::new(Token::MIN);
        let tokens = [
            signed(&known),
            signed(&unknown),
            signed(&keys("k1")),
            unsigned,
        ];
        let recorder = PrometheusBuilder::new().build_recorder();
        let accepted = |verification: Verification| {
            let verify =
                |token: &FencingToken| verification.verify(std::slice::from_ref(token)).is_ok();
            ::metrics::with_local_recorder(&recorder, || tokens.each_ref().map(verify))
        };
        assert_eq!(
            accepted(Verification::required(known.clone())),
            [true, false, false, false]
        );
        assert_eq!(
            accepted(Verification::optional(known)),
            [true, false, false, true]
        );
        let rendered = recorder.handle().render();
        for line in [
            "tower_fence_unknown_token_keys_total 2",
            "tower_fence_unsigned_tokens_total 1",
        ] {
            assert!(
                rendered.lines().any(|one| one == line),
                "{line}: {rendered}"
            );
        }
    }
}
