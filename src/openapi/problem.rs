//! The types of problem as schemas, one for each.

use serde_json::Value;
use utoipa::openapi::{
    Object, ObjectBuilder, Ref, RefOr, Schema, Type, extensions::Extensions, schema::OneOfBuilder,
};

use super::{
    header::capitalized,
    values::{resource, token},
};
use crate::problem::ProblemType;

/// The media type of problems.
pub(super) const PROBLEM_JSON: &str = "application/problem+json";

/// The name of the schema, such as `StaleTokenProblem`.
pub(super) fn name(kind: ProblemType) -> String {
    let words = kind.name().split('-').map(capitalized);
    format!("{}Problem", words.collect::<String>())
}

/// Which members a problem has beside the standard ones, and whether it always has them.
pub(super) const fn members(kind: ProblemType) -> &'static [(&'static str, bool)] {
    match kind {
        ProblemType::TokenRequired => &[("resource", false)],
        ProblemType::UnknownEpoch => &[("resource", true), ("presented_token", true)],
        ProblemType::StaleToken => &[
            ("resource", true),
            ("presented_token", true),
            ("max_token", true),
            ("by_floor", false),
            ("used", false),
        ],
        ProblemType::LockHeld => &[("resource", true), ("retry_after_ms", true)],
        ProblemType::LeaseLost | ProblemType::TooManyWaiters => &[("resource", true)],
        ProblemType::FenceExhausted => &[("resource", true), ("max_token", true)],
        ProblemType::InvalidRequest => &[("field", true)],
        ProblemType::BodyTooLarge => &[("limit_bytes", true)],
        ProblemType::MalformedToken
        | ProblemType::WrongResource
        | ProblemType::ForgedToken
        | ProblemType::Unauthorized
        | ProblemType::OperatorsOnly
        | ProblemType::ServerBusy
        | ProblemType::UnsupportedMediaType
        | ProblemType::IdempotencyKeyRequired
        | ProblemType::MalformedIdempotencyKey
        | ProblemType::IdempotencyPrincipalRequired
        | ProblemType::IdempotencyMismatch
        | ProblemType::IdempotencyInFlight
        | ProblemType::ResponseNotStored
        | ProblemType::UnknownRoute
        | ProblemType::BodyTimeout
        | ProblemType::MalformedBody
        | ProblemType::FenceBusy
        | ProblemType::StoreUnavailable
        | ProblemType::HandlerTimeout
        | ProblemType::OutcomeUnknown
        | ProblemType::TransactionAborted
        | ProblemType::UnfencedWrite
        | ProblemType::RowsUnreadable
        | ProblemType::TransactionEscaped
        | ProblemType::Misconfigured => &[],
    }
}

/// Whether the answer says when to ask again.
pub(super) fn has_retry_after(kind: ProblemType) -> bool {
    let passes = matches!(
        kind,
        ProblemType::LockHeld | ProblemType::IdempotencyInFlight
    );
    passes || kind.status() == 503
}

/// The schema of a member.
fn member(name: &str) -> Object {
    let integer = || ObjectBuilder::new().schema_type(Type::Integer);
    match name {
        "resource" => resource(),
        "presented_token" => token(),
        "max_token" => integer()
            .minimum(Some(0))
            .description(Some("The highest token of the resource that is dead."))
            .build(),
        "retry_after_ms" => integer()
            .minimum(Some(0))
            .description(Some("When to ask again, in milliseconds."))
            .build(),
        "limit_bytes" => integer()
            .minimum(Some(0))
            .description(Some("The greatest length of a body."))
            .build(),
        "by_floor" => constant(
            Type::Boolean,
            true,
            "The highest dead token is that of other resources, whose rows were removed.",
        ),
        "used" => constant(
            Type::Boolean,
            true,
            "The single-use token has written already.",
        ),
        _ => ObjectBuilder::new()
            .schema_type(Type::String)
            .description(Some("The part of the request without a valid value."))
            .build(),
    }
}

fn constant(of: Type, value: impl Into<Value>, description: &str) -> Object {
    ObjectBuilder::new()
        .schema_type(of)
        .description(Some(description))
        // utoipa has no field for it.
        .extensions(Some(Extensions::from_iter([("const", value.into())])))
        .build()
}

/// The schema of a problem of the application's own type, as [`Problem::custom`](crate::problem::Problem::custom) makes it.
/// Its further members are added to it, and what it is about as its description.
///
/// ```
/// use tower_fence::openapi::custom_problem;
/// use utoipa::{PartialSchema, ToSchema, openapi::{ObjectBuilder, RefOr, Schema, Type}};
///
/// struct OutOfStock;
///
/// impl PartialSchema for OutOfStock {
///     fn schema() -> RefOr<Schema> {
///         let stock = ObjectBuilder::new().schema_type(Type::Integer);
///         custom_problem("https://example.com/problems/out-of-stock", 409, "Not enough in stock")
///             .property("stock", stock)
///             .required("stock")
///             .into()
///     }
/// }
///
/// impl ToSchema for OutOfStock {}
/// ```
#[must_use]
pub fn custom_problem(uri: &str, status: u16, title: &str) -> ObjectBuilder {
    let text = |description| {
        ObjectBuilder::new()
            .schema_type(Type::String)
            .description(Some(description))
    };
    // Not as its title: generators name classes after that, and it may change.
    ObjectBuilder::new()
        .description(Some(title))
        .property("type", constant(Type::String, uri, "Which problem."))
        .property("title", text("A short text for people.").examples([title]))
        .property("status", constant(Type::Integer, status, "The status."))
        .property("detail", text("What went wrong this time, for people."))
        .required("type")
        .required("title")
        .required("status")
}

/// The schema of a problem of this type.
pub(super) fn schema(kind: ProblemType) -> Object {
    let lines = kind.documentation().lines().map(str::trim);
    let mut problem = custom_problem(kind.uri(), kind.status().as_u16(), kind.title())
        .description(Some(lines.collect::<Vec<_>>().join(" ")));
    for &(name, always) in members(kind) {
        problem = problem.property(name, member(name));
        if always {
            problem = problem.required(name);
        }
    }
    problem.build()
}

/// One of these schemas: `known`, and those of `kinds`.
pub(super) fn one_of(known: Option<RefOr<Schema>>, kinds: &[ProblemType]) -> RefOr<Schema> {
    let mut all = match known {
        Some(RefOr::T(Schema::OneOf(known))) => known.items,
        known => known.into_iter().collect(),
    };
    for &kind in kinds {
        let reference = RefOr::Ref(Ref::from_schema_name(name(kind)));
        if !all.contains(&reference) {
            all.push(reference);
        }
    }
    if all.len() == 1 {
        return all.remove(0);
    }
    let all = all
        .into_iter()
        .fold(OneOfBuilder::new(), OneOfBuilder::item);
    RefOr::T(all.build().into())
}

/// Whether a problem has the members of its schema, and no others.
#[cfg(test)]
pub(crate) fn fits(problem: &crate::problem::Problem) -> bool {
    let Ok(Value::Object(document)) = serde_json::to_value(problem) else {
        return false;
    };
    let mut kinds = ProblemType::ALL.iter();
    let Some(&kind) = kinds.find(|kind| document["type"] == kind.uri()) else {
        return false;
    };
    let schema = schema(kind);
    let known = document
        .keys()
        .all(|name| schema.properties.contains_key(name));
    let complete = schema
        .required
        .iter()
        .all(|name| document.contains_key(name));
    known && complete && document["status"] == kind.status().as_u16()
}
