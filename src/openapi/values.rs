//! The schemas of the crate's values, with their limits, and of the header fields.

use utoipa::{
    PartialSchema, ToSchema,
    openapi::{Object, ObjectBuilder, RefOr, Schema, Type},
};

use crate::{
    idempotency::IdempotencyKey,
    lease::{LeaseId, Owner},
    token::{Resource, Token},
};

/// A text.
pub(crate) fn text(description: &str) -> ObjectBuilder {
    ObjectBuilder::new()
        .schema_type(Type::String)
        .description(Some(description))
}

pub(super) fn resource() -> Object {
    text("The name of what is protected: 1 to 255 bytes of UTF-8 without control characters.")
        .min_length(Some(1))
        .max_length(Some(Resource::MAX_BYTES))
        .pattern(Some(r"^[^\u0000-\u001f\u007f-\u009f]+$"))
        .examples(["sku-1"])
        .build()
}

pub(super) fn token() -> Object {
    ObjectBuilder::new()
        .schema_type(Type::Integer)
        .description(Some("A fencing token."))
        .minimum(Some(Token::MIN.get()))
        .maximum(Some(Token::MAX.get()))
        .examples([1_000_000_001])
        .build()
}

fn lease_id() -> Object {
    let (shortest, longest) = (LeaseId::LENGTH.start(), LeaseId::LENGTH.end());
    text("The secret that proves who holds a lease.")
        .min_length(Some(*shortest))
        .max_length(Some(*longest))
        .pattern(Some(format!("^[A-Za-z0-9_-]{{{shortest},{longest}}}$")))
        .build()
}

fn owner() -> Object {
    text("Who holds the lease, for people: at most 255 bytes of UTF-8 without control characters.")
        .max_length(Some(Owner::MAX_BYTES))
        .pattern(Some(r"^[^\u0000-\u001f\u007f-\u009f]*$"))
        .examples(["worker-7"])
        .build()
}

macro_rules! schemas {
    ($($value:ty = $schema:ident;)*) => {$(
        impl PartialSchema for $value {
            fn schema() -> RefOr<Schema> {
                $schema().into()
            }
        }

        impl ToSchema for $value {}
    )*};
}

schemas! {
    Resource = resource;
    Token = token;
    LeaseId = lease_id;
    Owner = owner;
}

/// A member of the field `Fencing-Token`, as an issuer writes it.
fn named_member() -> String {
    const STRING: &str = r#""([ !#-\[\]-~]|\\["\\])+""#;
    // What a Display String escapes: quotes, percent signs, and UTF-8 of two to four bytes without control characters.
    const ESCAPED: &str = "%2[25]|%c2%[ab]H|%(c[3-9a-f]|dH)T|%e0%[ab]HT|%e[1-9a-cef]TT|%ed%[89]HT|%f0%[9ab]HTT|\
                           %f[1-3]TTT|%f4%8HTT";
    const SIGNATURE: &str = r#";key="[A-Za-z0-9_.-]{1,64}";mac=:[A-Za-z0-9+/]{22}==:"#;
    let escaped = ESCAPED.replace('T', "%[89ab]H").replace('H', "[0-9a-f]");
    format!(r#"{TOKEN};resource=({STRING}|%"([ !#$&-~]|{escaped})+")({SIGNATURE})?"#)
}

/// An Integer of RFC 9651 that is a token.
const TOKEN: &str = "[1-9][0-9]{0,14}";

fn field(description: &str, pattern: String) -> Object {
    text(description)
        .pattern(Some(pattern))
        .examples([r#"1000000001;resource="sku-1""#])
        .build()
}

/// The field `Fencing-Token` of an answer.
pub(crate) fn fencing_token() -> Object {
    let description = "The value of the header `Fencing-Token`, for writes under this lease.";
    field(description, format!("^{}$", named_member()))
}

/// The field `Fencing-Token` of a request for so many resources, where that is known. An empty one is as good as none.
pub(crate) fn fencing_tokens(at_most: Option<usize>, required: bool) -> Object {
    const ONE: &str = "The `fencing_token` of the lease, as it is.";
    const SEVERAL: &str = "The `fencing_token` of each lease, as it is, with commas between them: a List of RFC 9651, \
                           one member for each resource of the request.";
    let named = named_member();
    let (description, members) = match at_most {
        Some(1) => (ONE, format!("{named}|{TOKEN}")),
        Some(many) => {
            let others = many.saturating_sub(1);
            (SEVERAL, format!("{named}( *, *{named}){{0,{others}}}"))
        }
        None => (SEVERAL, format!("{TOKEN}|{named}( *, *{named})*")),
    };
    let may_be_empty = if required { "" } else { "?" };
    field(description, format!("^({members}){may_be_empty}$"))
}

/// The field `Idempotency-Key`.
pub(crate) fn idempotency_key() -> Object {
    text("A String of RFC 9651. A request that is repeated under its key is answered as it was the first time.")
        .pattern(Some(r#"^"([ !#-\[\]-~]|\\["\\])+"$"#))
        // The quotes count here.
        .max_length(Some(IdempotencyKey::MAX_BYTES + 2))
        .examples([r#""8e03978e-40d5-43dd-bc93-6894a57f9324""#])
        .build()
}

/// The field `Idempotent-Replayed`.
pub(crate) fn replayed() -> Object {
    text("The answer is the one that the key got the first time.")
        .enum_values(Some(["true"]))
        .build()
}
