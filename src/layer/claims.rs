//! Claims of a request: the token for each of its resources.

use super::{
    refusal::Refusal,
    resource::{ResourceError, Resources},
};
use crate::{
    fence::{Claim, Claims},
    header::{FencingToken, MalformedToken},
    token::{Resource, Token},
};

/// Finds the token of each resource. If the request names one resource, the header member may omit
/// the parameter `resource`. If the request names several resources, each member needs the
/// parameter, because the order of the members has no meaning.
pub(super) fn claims(tokens: Vec<FencingToken>, resources: Resources) -> Result<Claims, Refusal> {
    let named = resources.as_slice();
    if tokens.is_empty() && !named.is_empty() {
        return Err(Refusal::TokenRequired);
    }
    let found = tokens.len();
    if named.len() == 1 && found > 1 {
        return Err(MalformedToken::Count { found }.into());
    }
    if named.len() > 1 && tokens.iter().any(|token| token.resource.is_none()) {
        return Err(MalformedToken::Unnamed.into());
    }
    let other_resource = |token: &FencingToken| {
        let resource = token.resource.as_ref();
        resource
            .filter(|&resource| !named.contains(resource))
            .cloned()
    };
    if let Some(token_resource) = tokens.iter().find_map(other_resource) {
        return Err(Refusal::WrongResource {
            resources,
            token_resource,
        });
    }
    let claims = named.iter().map(|resource| {
        let token = token_for(resource, &tokens);
        let missing = || Refusal::TokenMissing(resource.clone());
        Ok(Claim::new(resource.clone(), token.ok_or_else(missing)?))
    });
    let claims = claims.collect::<Result<Vec<_>, Refusal>>()?;
    Claims::new(claims).ok_or_else(|| ResourceError::Nothing.into())
}

/// Returns the token of the first member that names the resource, or that names no resource.
fn token_for(resource: &Resource, tokens: &[FencingToken]) -> Option<Token> {
    let is_for = |token: &&FencingToken| {
        let named = token.resource.as_ref();
        named.is_none_or(|named| named == resource)
    };
    tokens.iter().find(is_for).map(|token| token.token)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_token_and_missing_resource_are_distinguished() {
        let resource = Resource::new("a").unwrap();
        let missing = claims(vec![], resource.into()).unwrap_err();
        assert!(matches!(missing, Refusal::TokenRequired));
        let nothing = claims(vec![], Vec::new().into()).unwrap_err();
        assert!(matches!(nothing, Refusal::Resource(ResourceError::Nothing)));
    }
}
