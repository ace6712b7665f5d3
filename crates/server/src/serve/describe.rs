//! The description of the server's authentication in the OpenAPI document of the issuer.

use serde_json::{Value, json};
use tower_fence::problem::ProblemType;

use super::{
    LOCKS,
    access::{Access, CHALLENGES, is_for_holders},
};

/// Adds the answers 401 and 403, which the server sends before a request reaches the issuer, and
/// the secret that each operation requires. The paths of the issuer are below [`LOCKS`]. A reload
/// cannot change whether secrets are configured, so the document stays valid.
pub fn describe(document: &mut Value, access: &Access) {
    if access.has_secrets() {
        document["components"]["securitySchemes"]["secret"] = json!({
            "type": "http",
            "scheme": "bearer",
            "description": "A secret of a holder or of an operator. Only operators may list and break leases.",
        });
        add_refusal(document, "Unauthorized", ProblemType::Unauthorized);
        document["components"]["responses"]["Unauthorized"]["headers"]["WWW-Authenticate"] = json!({
            "description": "Whether the secret is missing or unknown.",
            "schema": { "type": "string", "enum": CHALLENGES },
            "required": true,
        });
    }
    if access.has_secrets() || access.is_local_only() {
        add_refusal(document, "OperatorsOnly", ProblemType::OperatorsOnly);
    }
    let paths = document["paths"].as_object_mut().into_iter().flatten();
    for (path, item) in paths {
        let is_for_operators = !is_for_holders(&format!("{LOCKS}{path}"));
        for (_, operation) in item.as_object_mut().into_iter().flatten() {
            let mut refuses = |status: &str, name: &str| {
                operation["responses"][status] =
                    json!({ "$ref": format!("#/components/responses/{name}") });
            };
            if access.has_secrets() {
                refuses("401", "Unauthorized");
            }
            if access.is_local_only() || access.has_secrets() && is_for_operators {
                refuses("403", "OperatorsOnly");
            }
            // Client generators ignore a requirement for the whole document, so each operation has
            // its own.
            if access.has_secrets() {
                let roles: &[&str] = if is_for_operators { &["operator"] } else { &[] };
                operation["security"] = json!([{ "secret": roles }]);
            }
        }
    }
}

/// Adds a problem as a schema, and as a response of this name.
fn add_refusal(document: &mut Value, name: &str, kind: ProblemType) {
    let schema = format!("{name}Problem");
    document["components"]["schemas"][&schema] = json!({
        "type": "object",
        "required": ["type", "title", "status"],
        "properties": {
            "type": { "type": "string", "const": kind.uri() },
            "title": { "type": "string", "examples": [kind.title()] },
            "status": { "type": "integer", "const": kind.status().as_u16() },
            "detail": { "type": "string" },
        },
    });
    document["components"]["responses"][name] = json!({
        "description": format!("`{}`", kind.name()),
        "headers": { "Cache-Control": { "$ref": "#/components/headers/CacheControl" } },
        "content": { "application/problem+json": {
            "schema": { "$ref": format!("#/components/schemas/{schema}") },
        } },
    });
}
