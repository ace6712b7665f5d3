//! Headers of answers.

use http::HeaderName;
use utoipa::openapi::{
    Object, ObjectBuilder, RefOr, Type,
    extensions::Extensions,
    header::{Header, HeaderBuilder},
};

/// A header that each such answer has.
pub(crate) fn required(schema: Object) -> Header {
    let mut header = optional(schema);
    // utoipa has no field for it.
    header.extensions = Some(Extensions::from_iter([(REQUIRED, true)]));
    header
}

/// A header that an answer may have.
pub(crate) fn optional(schema: Object) -> Header {
    HeaderBuilder::new()
        .description(schema.description.clone())
        .schema(Some(schema))
        .build()
}

const REQUIRED: &str = "required";

/// Whether each such answer has it.
pub(super) fn is_required(header: &RefOr<Header>) -> bool {
    match header {
        RefOr::T(header) => {
            let extensions = header.extensions.as_ref();
            extensions.is_some_and(|known| known.contains_key(REQUIRED))
        }
        RefOr::Ref(_) => false,
    }
}

/// `Cache-Control: no-store`.
pub(crate) fn cache_control() -> Header {
    let value = ObjectBuilder::new()
        .schema_type(Type::String)
        .description(Some("No cache may keep the answer."))
        .enum_values(Some(["no-store"]));
    required(value.build())
}

/// `Retry-After`, in whole seconds.
pub(super) fn retry_after(always: bool) -> Header {
    let seconds = ObjectBuilder::new()
        .schema_type(Type::Integer)
        .description(Some("When to ask again, in seconds."))
        .minimum(Some(1))
        .maximum(Some(u32::MAX))
        .build();
    if always {
        required(seconds)
    } else {
        optional(seconds)
    }
}

/// The name of a field as it is commonly written, such as `Fencing-Token`.
pub(crate) fn spelled(name: &HeaderName) -> String {
    let words = name.as_str().split('-').map(capitalized);
    words.collect::<Vec<_>>().join("-")
}

/// An ASCII word with a capital letter.
pub(super) fn capitalized(word: &str) -> String {
    let mut word = word.to_owned();
    if let Some(first) = word.get_mut(..1) {
        first.make_ascii_uppercase();
    }
    word
}
