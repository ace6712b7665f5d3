//! The calls of both models of leases, as an issuer executes them.

use tower_fence::{
    Resource,
    epochs::Epoch,
    lease::{Acquire, LeaseError, LeaseId, Leases, Renew},
};
use tower_fence_model::lease::Kind;

use crate::support::lease::LONG;

/// Returns the real token for a token of a model whose epochs have this number of tokens.
pub fn real_token(model: u8, numbers: u8) -> i64 {
    i64::from(model / numbers) * Epoch::SIZE + i64::from(model % numbers)
}

/// Calls an issuer, and returns the token in its answer.
pub async fn call(
    issuer: &impl Leases,
    kind: Kind,
    resource: &Resource,
    id: &LeaseId,
) -> Option<i64> {
    let answer = match kind {
        Kind::Acquire => {
            let request = Acquire::new(LONG).lease_id(id.clone());
            issuer.acquire(resource, request).await.map(Some)
        }
        Kind::Renew { new_token } => {
            let mut request = Renew::new(LONG);
            if new_token {
                request = request.with_new_token();
            }
            issuer.renew(resource, id, request).await.map(Some)
        }
        Kind::Release => issuer.release(resource, id).await.map(|()| None),
    };
    match answer {
        Ok(lease) => lease.map(|lease| lease.token.get()),
        Err(LeaseError::Held { .. } | LeaseError::Lost { .. }) => None,
        Err(error) => panic!("{error:?}"),
    }
}
