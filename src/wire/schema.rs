//! The schema of an answer that has members only sometimes, which no derive writes.

use serde_json::json;
use utoipa::{
    PartialSchema, ToSchema,
    openapi::{ObjectBuilder, RefOr, Schema, Type, extensions::Extensions},
};

use super::{StateBody, answer::HeldBody};
use crate::token::Resource;

impl PartialSchema for StateBody {
    fn schema() -> RefOr<Schema> {
        let held = ObjectBuilder::new()
            .schema_type(Type::Boolean)
            .description(Some("Whether somebody has the lease."));
        let mut state = ObjectBuilder::new()
            .description(Some(
                "The state of a lock. Where it is held, also what everybody may see of the lease.",
            ))
            .property("held", held)
            .property("resource", Resource::schema())
            .required("held")
            .required("resource");
        if let RefOr::T(Schema::Object(lease)) = HeldBody::schema() {
            let is_held = json!({ "properties": { "held": { "const": true } } });
            state = state.extensions(Some(Extensions::from_iter([
                ("if", is_held),
                ("then", json!({ "required": lease.required })),
            ])));
            for (name, member) in lease.properties {
                state = state.property(name, member);
            }
        }
        state.into()
    }
}

impl ToSchema for StateBody {
    fn name() -> std::borrow::Cow<'static, str> {
        "LockState".into()
    }
}
