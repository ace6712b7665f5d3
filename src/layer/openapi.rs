//! Adds the effects of the layer to an OpenAPI document.

use utoipa::openapi::{HttpMethod, OpenApi};

use super::{FenceLayer, ResourceFrom};
use crate::{
    fence::FenceDatabase,
    idempotency::{IDEMPOTENCY_KEY, IDEMPOTENT_REPLAYED},
    openapi::{
        add_schemas, answer_header, answer_problems, fencing_tokens, idempotency_key, operations,
        optional, replayed, take_header,
    },
    problem::ProblemType,
};

impl<DB: FenceDatabase, R: ResourceFrom> FenceLayer<DB, R> {
    /// Adds this layer's headers and refusals to each operation of a document.
    ///
    /// Call it with the operations of the routes that the layer wraps, before other operations are
    /// merged in, and after all settings of the layer: the document follows them. See
    /// [`openapi`](crate::openapi) for an example.
    #[cfg_attr(docsrs, doc(cfg(feature = "openapi")))]
    pub fn describe(&self, api: &mut OpenApi) {
        let (reads, writes) = (self.problems_of_reads(), self.problems_of_writes());
        let keys = self.config.idempotency.as_deref();
        let at_most = self.config.resource_from.at_most();
        for (method, operation) in operations(api) {
            let token = &self.config.header;
            match method {
                // These methods pass without a check.
                HttpMethod::Options | HttpMethod::Trace => {}
                HttpMethod::Get | HttpMethod::Head => {
                    take_header(operation, token, false, fencing_tokens(at_most, false));
                    answer_problems(operation, &reads);
                }
                _ => {
                    take_header(operation, token, true, fencing_tokens(at_most, true));
                    if let Some(keys) = keys {
                        let required = keys.is_required();
                        take_header(operation, &IDEMPOTENCY_KEY, required, idempotency_key());
                        answer_header(operation, &IDEMPOTENT_REPLAYED, &optional(replayed()));
                    }
                    answer_problems(operation, &writes);
                }
            }
        }
        add_schemas(api, &writes);
    }

    /// Returns the problems with which a request with a token may be refused.
    fn problems_of_reads(&self) -> Vec<ProblemType> {
        let config = &self.config;
        let mut problems = vec![
            ProblemType::MalformedToken,
            ProblemType::MalformedBody,
            ProblemType::WrongResource,
            ProblemType::BodyTimeout,
            ProblemType::StaleToken,
            ProblemType::BodyTooLarge,
            ProblemType::InvalidRequest,
            ProblemType::TokenRequired,
            ProblemType::Misconfigured,
            ProblemType::FenceBusy,
            ProblemType::StoreUnavailable,
        ];
        if config.verification.is_some() {
            problems.push(ProblemType::ForgedToken);
        }
        if config.known_epochs {
            problems.push(ProblemType::UnknownEpoch);
        }
        problems
    }

    /// Returns the problems with which a write may be refused.
    fn problems_of_writes(&self) -> Vec<ProblemType> {
        let mut problems = self.problems_of_reads();
        problems.extend([
            ProblemType::TransactionAborted,
            ProblemType::TransactionEscaped,
            ProblemType::UnfencedWrite,
            ProblemType::RowsUnreadable,
            ProblemType::HandlerTimeout,
            ProblemType::OutcomeUnknown,
        ]);
        if let Some(keys) = &self.config.idempotency {
            problems.extend([
                ProblemType::MalformedIdempotencyKey,
                ProblemType::IdempotencyInFlight,
                ProblemType::IdempotencyMismatch,
                ProblemType::ResponseNotStored,
            ]);
            if keys.is_required() {
                problems.push(ProblemType::IdempotencyKeyRequired);
            }
            if !keys.names_principal() {
                problems.push(ProblemType::IdempotencyPrincipalRequired);
            }
        }
        problems
    }
}

#[cfg(all(test, feature = "sqlite", feature = "issuer", feature = "memory"))]
mod tests {
    use serde_json::Value;
    use utoipa::openapi::{
        Content, Object, PathItem, Paths, RefOr, Response,
        path::{OperationBuilder, PathsBuilder},
    };

    use super::*;
    use crate::{
        fence::Fence,
        issuer::Issuer,
        layer::{Idempotency, PathParam},
        lease::MemoryLeases,
        token_keys::{TokenKey, TokenKeys},
    };

    fn fence() -> Fence<sqlx::Sqlite> {
        let pool = sqlx::sqlite::SqlitePoolOptions::new();
        Fence::new(pool.connect_lazy("sqlite::memory:").unwrap())
    }

    /// Returns a write and a read with these documented responses.
    fn paths(answer: impl Into<RefOr<Response>>) -> Paths {
        let answer = answer.into();
        let operation = || {
            OperationBuilder::new()
                .response("409", answer.clone())
                .response("200", Response::new("done"))
        };
        let mut item = PathItem::new(HttpMethod::Post, operation());
        item.get = Some(operation().build());
        PathsBuilder::new().path("/a", item).build()
    }

    fn described<R: ResourceFrom>(layer: &FenceLayer<sqlx::Sqlite, R>) -> Value {
        let mut conflict = Response::new("out of stock");
        let content = Content::new(Some(Object::new()));
        conflict
            .content
            .insert("application/problem+json".into(), content.into());
        let mut api = OpenApi::default();
        api.paths = paths(conflict);
        layer.describe(&mut api);
        serde_json::to_value(api).unwrap()
    }

    fn names(operation: &Value) -> Vec<(&str, bool)> {
        let parameters = operation["parameters"].as_array().unwrap().iter();
        let name = |one: &'_ Value| one["required"] == true;
        parameters
            .map(|one| (one["name"].as_str().unwrap(), name(one)))
            .collect()
    }

    #[tokio::test]
    async fn a_write_needs_what_the_layer_needs_and_a_read_may_have_it() {
        let api = described(&FenceLayer::new(fence(), PathParam("a")));
        let item = &api["paths"]["/a"];
        assert_eq!(names(&item["post"]), [("Fencing-Token", true)]);
        assert_eq!(names(&item["get"]), [("Fencing-Token", false)]);
        assert!(item["post"]["responses"].get("412").is_some());
        assert!(item["get"]["responses"].get("412").is_some());

        let keys = Idempotency::required();
        let layer = FenceLayer::new(fence(), PathParam("a"))
            .header(http::HeaderName::from_static("x-token"))
            .idempotent(keys);
        let api = described(&layer);
        let item = &api["paths"]["/a"];
        assert_eq!(
            names(&item["post"]),
            [("X-Token", true), ("Idempotency-Key", true)]
        );
        assert_eq!(names(&item["get"]), [("X-Token", false)]);
        let done = &item["post"]["responses"]["200"]["headers"];
        assert!(done.get("Idempotent-Replayed").is_some());
    }

    #[tokio::test]
    async fn an_answer_of_the_application_stands_beside_those_of_the_layer() {
        let layer = FenceLayer::new(fence(), PathParam("a")).idempotent(Idempotency::optional());
        let api = described(&layer);
        let conflict = &api["paths"]["/a"]["post"]["responses"]["409"];
        let content = &conflict["content"]["application/problem+json"]["schema"];
        let all = content["oneOf"].as_array().unwrap();
        assert_eq!(all.len(), 2, "{all:?}");
        assert_eq!(
            all[1]["$ref"],
            "#/components/schemas/IdempotencyInFlightProblem"
        );
        assert_eq!(conflict["headers"]["Retry-After"].get("required"), None);
        let busy = &api["paths"]["/a"]["post"]["responses"]["503"];
        assert_eq!(busy["headers"]["Retry-After"]["required"], true);
    }

    #[tokio::test]
    async fn each_type_of_problem_is_in_a_document() {
        let keys = TokenKeys::new([TokenKey::random("k1").unwrap()]).unwrap();
        let layer = FenceLayer::new(fence(), PathParam("a"))
            .idempotent(Idempotency::required())
            .issued_by_this_database()
            .verify_with(keys);
        let mut api = Issuer::new(MemoryLeases::new(fence())).openapi();
        api.paths.merge(paths(Response::new("")));
        layer.describe(&mut api);
        let text = serde_json::to_string(&api).unwrap();
        for kind in ProblemType::ALL {
            // `UnknownRoute` answers a path without an operation; the server answers the others.
            let is_elsewhere = matches!(
                kind,
                ProblemType::UnknownRoute
                    | ProblemType::Unauthorized
                    | ProblemType::OperatorsOnly
                    | ProblemType::ServerBusy
            );
            assert_eq!(text.contains(kind.uri()), !is_elsewhere, "{kind:?}");
        }
        let reference = |name: &str| text.contains(&format!("schemas/{name}Problem\""));
        assert!(reference("StaleToken") && reference("LockHeld"));
    }
}
