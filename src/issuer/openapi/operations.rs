//! Parts of the operations that the handlers' attributes do not contain: parameters, headers,
//! refusals and links.

use http::header::CACHE_CONTROL;
use utoipa::{
    PartialSchema,
    openapi::{
        Object, ObjectBuilder, OpenApi, RefOr, Required, Schema, Type,
        link::Link,
        path::{Operation, Parameter, ParameterBuilder, ParameterIn},
    },
};

use crate::{
    header::FENCING_TOKEN,
    issuer::{
        operators,
        request::{BODY_LIMIT_BYTES, BODY_WAIT},
    },
    lease::LeaseId,
    openapi::{
        add_schemas, answer_header, answer_problems, cache_control, fencing_token, operations,
        required, take_header, text,
    },
    problem::ProblemType,
    token::Resource,
    wire::LEASE_ID,
};

/// Completes each operation, and adds the schemas of its refusals.
pub(super) fn complete(api: &mut OpenApi) {
    let mut all = Vec::new();
    for (_, operation) in operations(api) {
        let id = operation.operation_id.clone().unwrap_or_default();
        take_parameters(operation, &id);
        answer_header(operation, &CACHE_CONTROL, &cache_control());
        add_links(operation, &id);
        let problems = problems(&id);
        answer_problems(operation, problems);
        all.extend_from_slice(problems);
        if let Some(RefOr::T(body)) = &mut operation.request_body {
            let seconds = BODY_WAIT.as_secs();
            body.required = Some(Required::False);
            body.description = Some(format!(
                "At most {BODY_LIMIT_BYTES} bytes, which arrive within {seconds} s, of `application/json` or another \
                 type that ends with `+json`."
            ));
        }
    }
    add_schemas(api, &all);
}

/// Returns the refusals of an operation.
fn problems(id: &str) -> &'static [ProblemType] {
    match id {
        "acquire_lease" => &[
            ProblemType::MalformedBody,
            ProblemType::BodyTimeout,
            ProblemType::LockHeld,
            ProblemType::FenceExhausted,
            ProblemType::BodyTooLarge,
            ProblemType::UnsupportedMediaType,
            ProblemType::InvalidRequest,
            ProblemType::TooManyWaiters,
            ProblemType::StoreUnavailable,
            ProblemType::Misconfigured,
        ],
        "renew_lease" => &[
            ProblemType::MalformedBody,
            ProblemType::BodyTimeout,
            ProblemType::LeaseLost,
            ProblemType::FenceExhausted,
            ProblemType::BodyTooLarge,
            ProblemType::UnsupportedMediaType,
            ProblemType::InvalidRequest,
            ProblemType::StoreUnavailable,
            ProblemType::Misconfigured,
        ],
        "release_lease" => &[
            ProblemType::MalformedBody,
            ProblemType::BodyTimeout,
            ProblemType::LeaseLost,
            ProblemType::BodyTooLarge,
            ProblemType::InvalidRequest,
            ProblemType::StoreUnavailable,
            ProblemType::Misconfigured,
        ],
        "break_lease" => &[
            ProblemType::MalformedBody,
            ProblemType::BodyTimeout,
            ProblemType::LeaseLost,
            ProblemType::BodyTooLarge,
            ProblemType::UnsupportedMediaType,
            ProblemType::InvalidRequest,
            ProblemType::StoreUnavailable,
            ProblemType::Misconfigured,
        ],
        _ => &[
            ProblemType::InvalidRequest,
            ProblemType::StoreUnavailable,
            ProblemType::Misconfigured,
        ],
    }
}

fn take_parameters(operation: &mut Operation, id: &str) {
    let parameters = operation.parameters.get_or_insert_default();
    if id == "list_leases" {
        let limit = ObjectBuilder::new()
            .schema_type(Type::Integer)
            .minimum(Some(*operators::LIMITS.start()))
            .maximum(Some(*operators::LIMITS.end()))
            .default(Some(operators::LIMIT.into()))
            .description(Some("How many leases the page has at most."));
        let cursor = text("The `cursor` of the page before. Nothing else is one.");
        for (name, schema) in [("limit", limit.build()), ("cursor", cursor.build())] {
            parameters.push(parameter(name, ParameterIn::Query, Required::False, schema).into());
        }
        return;
    }
    let resource = object_of::<Resource>();
    parameters.push(parameter("resource", ParameterIn::Path, Required::True, resource).into());
    if matches!(id, "renew_lease" | "release_lease") {
        take_header(operation, &LEASE_ID, true, object_of::<LeaseId>());
    }
}

fn parameter(name: &str, place: ParameterIn, required: Required, schema: Object) -> Parameter {
    ParameterBuilder::new()
        .name(name)
        .parameter_in(place)
        .required(required)
        .description(schema.description.clone())
        .schema(Some(schema))
        .build()
}

/// Adds the headers and links of a successful response. The links lead to the calls for the lease.
fn add_links(operation: &mut Operation, id: &str) {
    let leads_to: &[(&str, &str)] = match id {
        "acquire_lease" => {
            answer_header(operation, &FENCING_TOKEN, &required(fencing_token()));
            &[("Renew", "renew_lease"), ("Release", "release_lease")]
        }
        "renew_lease" => {
            answer_header(operation, &FENCING_TOKEN, &required(fencing_token()));
            &[("Renew", "renew_lease"), ("Release", "release_lease")]
        }
        _ => &[],
    };
    for answer in operation.responses.responses.values_mut() {
        let RefOr::T(answer) = answer else { continue };
        for &(name, operation_id) in leads_to {
            let link = Link::builder()
                .operation_id(operation_id)
                .parameter("resource", "$response.body#/resource")
                .parameter("Lease-Id", "$response.body#/lease_id");
            answer.links.insert(name.into(), link.build().into());
        }
        if id == "list_leases" {
            let link = Link::builder()
                .operation_id("list_leases")
                .parameter("cursor", "$response.body#/cursor");
            answer.links.insert("Next".into(), link.build().into());
        }
    }
}

/// Returns the schema of a value.
fn object_of<T: PartialSchema>() -> Object {
    match T::schema() {
        RefOr::T(Schema::Object(object)) => object,
        _ => Object::default(),
    }
}
