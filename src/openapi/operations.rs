//! Changes to the operations of a document.

use std::collections::BTreeMap;

use http::{
    HeaderName,
    header::{CACHE_CONTROL, RETRY_AFTER},
};
use utoipa::openapi::{
    Content, HttpMethod, Object, OpenApi, PathItem, RefOr, Required, Response, ResponseBuilder,
    header::Header,
    path::{Operation, Parameter, ParameterBuilder, ParameterIn},
};

use super::{
    header::{cache_control, is_required, retry_after, spelled},
    problem::{PROBLEM_JSON, has_retry_after, name, one_of, schema},
};
use crate::problem::ProblemType;

/// Adds problems to the answers of each operation, beside those that it has.
///
/// For what handlers answer themselves: with [`Problem::new`](crate::problem::Problem::new), or with a `DatabaseError`.
pub fn add_problems(api: &mut OpenApi, kinds: &[ProblemType]) {
    for (_, operation) in operations(api) {
        answer_problems(operation, kinds);
    }
    add_schemas(api, kinds);
}

/// All operations, with their methods.
pub(crate) fn operations(api: &mut OpenApi) -> impl Iterator<Item = (HttpMethod, &mut Operation)> {
    let paths = api.paths.paths.values_mut();
    paths.flat_map(|path: &mut PathItem| {
        let methods = [
            (HttpMethod::Get, &mut path.get),
            (HttpMethod::Put, &mut path.put),
            (HttpMethod::Post, &mut path.post),
            (HttpMethod::Delete, &mut path.delete),
            (HttpMethod::Options, &mut path.options),
            (HttpMethod::Head, &mut path.head),
            (HttpMethod::Patch, &mut path.patch),
            (HttpMethod::Trace, &mut path.trace),
        ];
        let known = methods.into_iter();
        known.filter_map(|(method, operation)| Some((method, operation.as_mut()?)))
    })
}

/// Adds the schemas of problems that operations refer to.
pub(crate) fn add_schemas(api: &mut OpenApi, kinds: &[ProblemType]) {
    let schemas = &mut api.components.get_or_insert_default().schemas;
    for &kind in kinds {
        schemas.insert(name(kind), schema(kind).into());
    }
}

/// Adds problems to the answers of one operation.
pub(crate) fn answer_problems(operation: &mut Operation, kinds: &[ProblemType]) {
    let mut by_status = BTreeMap::<_, Vec<_>>::new();
    for &kind in kinds {
        by_status
            .entry(kind.status().as_u16())
            .or_default()
            .push(kind);
    }
    let answers = &mut operation.responses.responses;
    for (status, kinds) in by_status {
        let answer = match answers.remove(&status.to_string()) {
            Some(RefOr::T(known)) => beside(known, &kinds).into(),
            // What is written elsewhere is not known here.
            Some(reference) => reference,
            None => beside_nothing(&kinds).into(),
        };
        answers.insert(status.to_string(), answer);
    }
}

/// An answer that is one of these problems.
fn beside_nothing(kinds: &[ProblemType]) -> Response {
    let mut answer = ResponseBuilder::new()
        .description(names(kinds))
        .content(PROBLEM_JSON, Content::new(Some(one_of(None, kinds))))
        .header(spelled(&CACHE_CONTROL), cache_control());
    if kinds.iter().copied().any(has_retry_after) {
        let always = kinds.iter().copied().all(has_retry_after);
        answer = answer.header(spelled(&RETRY_AFTER), retry_after(always));
    }
    answer.build()
}

/// An answer that may be one of these problems, too.
fn beside(mut known: Response, kinds: &[ProblemType]) -> Response {
    let content = known.content.entry(PROBLEM_JSON.into());
    if let RefOr::T(content) = content.or_insert_with(|| Content::default().into()) {
        content.schema = Some(one_of(content.schema.take(), kinds));
    }
    known.description = format!("{}; {}", known.description, names(kinds));
    let name = spelled(&RETRY_AFTER);
    let before = known.headers.get(&name).map(is_required);
    let always = kinds.iter().copied().all(has_retry_after);
    if before.is_some() || kinds.iter().copied().any(has_retry_after) {
        let header = retry_after(always && before == Some(true));
        known.headers.insert(name, header.into());
    }
    known
}

/// The names of problems, as a text.
fn names(kinds: &[ProblemType]) -> String {
    let names = kinds.iter().map(|kind| format!("`{}`", kind.name()));
    names.collect::<Vec<_>>().join(", ")
}

/// Adds a header to the answers below 400.
pub(crate) fn answer_header(operation: &mut Operation, name: &HeaderName, header: &Header) {
    for (status, answer) in &mut operation.responses.responses {
        if let RefOr::T(answer) = answer
            && status.starts_with(['2', '3'])
        {
            answer.headers.insert(spelled(name), header.clone().into());
        }
    }
}

/// Adds a header to the parameters.
pub(crate) fn take_header(
    operation: &mut Operation,
    name: &HeaderName,
    required: bool,
    schema: Object,
) {
    let required = if required {
        Required::True
    } else {
        Required::False
    };
    let description = schema.description.clone();
    let parameter: Parameter = ParameterBuilder::new()
        .name(spelled(name))
        .parameter_in(ParameterIn::Header)
        .required(required)
        .description(description)
        .schema(Some(schema))
        .build();
    let parameters = operation.parameters.get_or_insert_default();
    parameters.push(parameter.into());
}
