//! What stands in front of the issuer, in its OpenAPI document: secrets, and the limit of requests.

use std::mem;

use tower_fence::{openapi::add_problems, problem::ProblemType};
use utoipa::openapi::{
    HeaderBuilder, ObjectBuilder, OpenApi, PathItem, RefOr, Type,
    extensions::Extensions,
    header::Header,
    path::Operation,
    security::{HttpAuthScheme, HttpBuilder, SecurityRequirement, SecurityScheme},
};

use super::{
    LOCKS,
    access::{Access, CHALLENGES, is_for_holders},
};

/// The name of the scheme.
const SCHEME: &str = "secret";
/// The role of those who may use the routes that are not for holders.
const OPERATOR: &str = "operator";

/// Adds to the document of the issuer, whose paths are below [`LOCKS`], what is answered instead of it. Whether there are
/// secrets is the same until the server ends.
pub fn describe(api: &mut OpenApi, access: &Access) {
    add_problems(api, &[ProblemType::ServerBusy]);
    if access.has_secrets() {
        describe_secrets(api);
    } else if !access.allows_anyone() {
        add_problems(api, &[ProblemType::OperatorsOnly]);
    }
}

fn describe_secrets(api: &mut OpenApi) {
    let scheme = HttpBuilder::new()
        .scheme(HttpAuthScheme::Bearer)
        .description(Some(
            "A secret of holders or of operators. `GET /locks` and breaking a lease take one of operators.",
        ));
    let components = api.components.get_or_insert_default();
    components.add_security_scheme(SCHEME, SecurityScheme::Http(scheme.build()));

    // Nobody but operators is let through to these.
    let all = mem::take(&mut api.paths.paths).into_iter();
    let (of_holders, of_operators) =
        all.partition(|(path, _)| is_for_holders(&format!("{LOCKS}{path}")));
    api.paths.paths = of_operators;
    add_problems(api, &[ProblemType::OperatorsOnly]);
    require(api, SecurityRequirement::new(SCHEME, [OPERATOR]));
    let of_operators = mem::replace(&mut api.paths.paths, of_holders);
    require(api, SecurityRequirement::new::<_, _, &str>(SCHEME, []));
    api.paths.paths.extend(of_operators);

    add_problems(api, &[ProblemType::Unauthorized]);
    for operation in operations(api) {
        let status = ProblemType::Unauthorized.status();
        if let Some(RefOr::T(answer)) = operation.responses.responses.get_mut(status.as_str()) {
            let name = "WWW-Authenticate".to_owned();
            answer.headers.insert(name, challenge().into());
        }
    }
}

/// Requires this of each operation. A requirement of the whole document is one that generators of clients pass over.
fn require(api: &mut OpenApi, requirement: SecurityRequirement) {
    for operation in operations(api) {
        operation.security = Some(vec![requirement.clone()]);
    }
}

/// The operations of the issuer.
fn operations(api: &mut OpenApi) -> impl Iterator<Item = &mut Operation> {
    let paths = api.paths.paths.values_mut();
    paths.flat_map(|path: &mut PathItem| {
        let methods = [
            &mut path.get,
            &mut path.put,
            &mut path.post,
            &mut path.delete,
        ];
        methods.into_iter().flatten()
    })
}

/// `WWW-Authenticate`.
fn challenge() -> Header {
    let description = Some("What is missing: a secret, or one that is known.");
    let schema = ObjectBuilder::new()
        .schema_type(Type::String)
        .description(description)
        .enum_values(Some(CHALLENGES));
    let mut header = HeaderBuilder::new()
        .description(description)
        .schema(Some(schema))
        .build();
    // utoipa has no field for it.
    header.extensions = Some(Extensions::from_iter([("required", true)]));
    header
}
