//! The OpenAPI document of the service. `openapi.json` describes the inventory's routes, and the
//! issuer describes its own routes. Schemas and responses that both documents use are in the
//! issuer's document.

use serde_json::{Map, Value, json};

pub const NOT_FOUND: &str = "https://example.com/problems/not-found";
pub const OUT_OF_STOCK: &str = "https://example.com/problems/out-of-stock";

const INVENTORY: &str = include_str!("openapi.json");

/// Merges both documents. The issuer is nested at `/locks`.
pub fn document(mut locks: Value) -> Value {
    let mut document: Value = serde_json::from_str(INVENTORY).expect("the file is JSON");
    document["info"]["version"] = env!("CARGO_PKG_VERSION").into();
    link_writes(&mut locks);
    for (path, item) in object(&mut locks["paths"]) {
        let path = format!("/locks{}", path.trim_end_matches('/'));
        document["paths"][path] = item.take();
    }
    for (kind, all) in object(&mut locks["components"]) {
        for (name, value) in object(all) {
            document["components"][kind][name] = value.take();
        }
    }
    document
}

/// Links a granted lease to the writes under its token.
fn link_writes(locks: &mut Value) {
    let links = &mut locks["paths"]["/{resource}"]["post"]["responses"]["201"]["links"];
    for (name, operation) in [
        ("SetStock", "set_stock"),
        ("DecrementStock", "decrement_stock"),
    ] {
        links[name] = json!({
            "operationId": operation,
            "parameters": {
                "sku": "$response.body#/resource",
                "Fencing-Token": "$response.body#/fencing_token",
            },
        });
    }
}

fn object(value: &mut Value) -> &mut Map<String, Value> {
    value.as_object_mut().expect("it is an object")
}
