//! Which token is for which resource.

use super::{
    rejection::Rejection,
    resource::{ResourceError, Resources},
};
use crate::{
    fence::{Admitted, AllAdmitted},
    header::{FencingToken, MalformedToken},
    token::{Resource, Token},
};

/// Finds the token of each resource. A request for one resource may leave out the parameter
/// `resource`; one for several may not, since the order of members says nothing.
pub(super) fn presented(
    tokens: Vec<FencingToken>,
    resources: Resources,
) -> Result<AllAdmitted, Rejection> {
    let named = resources.as_slice();
    if tokens.is_empty() && !named.is_empty() {
        return Err(Rejection::TokenRequired);
    }
    let stranger = |token: &FencingToken| {
        let resource = token.resource.as_ref();
        resource
            .filter(|&resource| !named.contains(resource))
            .cloned()
    };
    let found = tokens.len();
    if named.len() == 1 && found > 1 {
        return Err(MalformedToken::Count { found }.into());
    }
    if named.len() > 1 && tokens.iter().any(|token| token.resource.is_none()) {
        return Err(MalformedToken::Unnamed.into());
    }
    if let Some(token_resource) = tokens.iter().find_map(stranger) {
        return Err(Rejection::WrongResource {
            resources,
            token_resource,
        });
    }
    let admitted = named.iter().map(|resource| {
        let token = token_for(resource, &tokens);
        let missing = || Rejection::TokenMissing(resource.clone());
        Ok(Admitted::new(resource.clone(), token.ok_or_else(missing)?))
    });
    let admitted = admitted.collect::<Result<Vec<_>, Rejection>>()?;
    AllAdmitted::new(admitted).ok_or_else(|| ResourceError::Nothing.into())
}

fn token_for(resource: &Resource, tokens: &[FencingToken]) -> Option<Token> {
    let made_for = |token: &&FencingToken| {
        let named = token.resource.as_ref();
        named.is_none_or(|named| named == resource)
    };
    tokens.iter().find(made_for).map(|token| token.token)
}
