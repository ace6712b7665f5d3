//! Extractors for handlers: the transaction, and the admitted resources and tokens.

use std::convert::Infallible;

use axum::{
    extract::{FromRequestParts, MatchedPath, OptionalFromRequestParts},
    response::{IntoResponse, Response},
};
use http::request::Parts;

use super::failure;
use crate::{
    fence::{Admitted, FenceDatabase, FencedTx, Slot},
    metrics,
    problem::{Problem, ProblemType},
};

/// Borrows the request's transaction for the handler; see [`FencedTx`].
impl<DB: FenceDatabase, S: Sync> FromRequestParts<S> for FencedTx<DB> {
    type Rejection = NoTransaction;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Self::Rejection> {
        let Some(slot) = parts.extensions.get::<Slot<DB>>() else {
            return Err(NoTransaction::without_layer::<DB>(parts));
        };
        if slot.is_pending() {
            return Err(NoTransaction::Deferred);
        }
        Self::borrow(slot).ok_or(NoTransaction::InUse)
    }
}

/// Extracts the request's transaction, or `None` if the method is safe and the request has no
/// token. One handler can then serve both plain reads and fenced requests. On a route without a
/// layer, returns `None` for every request with a safe method, even if it has a token.
///
/// # Errors
///
/// For every other request, returns the errors of the extractor [`FencedTx`]. For example,
/// extraction fails if another extractor has already taken the transaction, or if no layer wraps
/// the handler of a write. If extraction returned `None` in the second case, the write would run
/// unfenced.
impl<DB: FenceDatabase, S: Sync> OptionalFromRequestParts<S> for FencedTx<DB> {
    type Rejection = NoTransaction;

    async fn from_request_parts(
        parts: &mut Parts,
        state: &S,
    ) -> Result<Option<Self>, Self::Rejection> {
        match <Self as FromRequestParts<S>>::from_request_parts(parts, state).await {
            Ok(tx) => Ok(Some(tx)),
            Err(NoTransaction::SafeMethod) => Ok(None),
            Err(error) => Err(error),
        }
    }
}

/// Extracts the resources and tokens of a write or of a fenced read. A handler that also serves
/// plain reads extracts `Option<Admitted>` instead.
///
/// Unlike `Option<FencedTx>`, `Option<Admitted>` is also `None` for a write that no layer has
/// admitted. The missing layer is then not reported. A handler that writes must therefore extract
/// `FencedTx` or `Admitted` as well.
impl<S: Sync> FromRequestParts<S> for Admitted {
    type Rejection = NoTransaction;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Self::Rejection> {
        let admitted = parts.extensions.get::<Self>().cloned();
        admitted.ok_or_else(|| match parts.extensions.get() {
            Some(Passed::PlainRead) => NoTransaction::PlainRead,
            Some(Passed::Fenced { deferred: true, .. }) => NoTransaction::Deferred,
            _ => NoTransaction::no_layer(parts),
        })
    }
}

impl<S: Sync> OptionalFromRequestParts<S> for Admitted {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Option<Self>, Infallible> {
        Ok(parts.extensions.get::<Self>().cloned())
    }
}

/// Request extension that states how the layer has passed the request on. A layer that reads
/// another header field does not replace [`Self::Fenced`] with [`Self::PlainRead`].
#[derive(Clone, Copy)]
pub(super) enum Passed {
    /// Without a transaction, because the method is safe and needs no token.
    PlainRead,
    /// Through the fence.
    Fenced {
        database: &'static str,
        deferred: bool,
    },
}

/// Error returned when an extractor cannot provide the request's transaction or its claims.
///
/// Every variant except [`PlainRead`](Self::PlainRead) is a programming error in the service, and
/// the response is 500.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NoTransaction {
    /// No `FenceLayer` for this database wraps the handler.
    #[error("no fence: add `.route_layer(FenceLayer::new(fence, …))` to this route")]
    NoLayer,
    /// The fence of this route uses one database, and the handler's extractor uses another.
    #[error(
        "this route's fence uses {fenced_by}, but its handler extracts a transaction of {asked_for}"
    )]
    OtherDatabase {
        /// The database of the fence.
        fenced_by: &'static str,
        /// The database of the extractor.
        asked_for: &'static str,
    },
    /// The handler serves a safe method without a token, which has no transaction.
    #[error("a safe method has no fenced transaction: take the pool from the state instead")]
    SafeMethod,
    /// The handler serves only fenced reads, and the request has no token. The response is 428.
    #[error("this read needs a fencing token")]
    PlainRead,
    /// The layer is deferred, so the handler must begin the transaction itself.
    #[error(
        "this layer is deferred: take `PendingWrite`, which begins the transaction, or remove \
         `.deferred()` from it"
    )]
    Deferred,
    /// The transaction has already begun, because the layer is not deferred, or the request is a
    /// fenced read.
    #[error(
        "the transaction has already begun, because the layer is not deferred or the request is a \
         fenced read: take `FencedTx`, or add `.deferred()` to the layer of a write"
    )]
    NotDeferred,
    /// Another extractor has taken the transaction and not returned it, or the transaction is
    /// already committed.
    #[error("the fenced transaction was already taken by another extractor")]
    InUse,
}

impl NoTransaction {
    /// Returns the reason why no layer of this database has prepared the request.
    pub(super) fn without_layer<DB: FenceDatabase>(parts: &Parts) -> Self {
        match parts.extensions.get() {
            Some(&Passed::Fenced { database, .. }) if database != DB::NAME => Self::OtherDatabase {
                fenced_by: database,
                asked_for: DB::NAME,
            },
            _ if parts.method.is_safe() => Self::SafeMethod,
            _ => Self::no_layer(parts),
        }
    }

    /// Logs and counts a missing layer. The service responds with 500 until a developer adds the
    /// layer.
    fn no_layer(parts: &Parts) -> Self {
        let route = parts.extensions.get::<MatchedPath>();
        metrics::count("tower_fence_missing_layer_total");
        tracing::error!(
            method = %parts.method,
            route = route.map(MatchedPath::as_str),
            "a handler needs a fence, but its route has none: add `.route_layer(FenceLayer::new(fence, …))`"
        );
        Self::NoLayer
    }
}

impl IntoResponse for NoTransaction {
    fn into_response(self) -> Response {
        let kind = match self {
            Self::PlainRead => ProblemType::TokenRequired,
            _ => ProblemType::Misconfigured,
        };
        let problem = Problem::new(kind).detail(self.to_string());
        match self {
            // `no_layer` has already logged and counted this error, with the route.
            Self::NoLayer => return problem.into_response(),
            Self::PlainRead => {}
            _ => tracing::error!(
                error = self.to_string(),
                "a handler did not get a fenced transaction"
            ),
        }
        failure::marked(kind, problem)
    }
}

#[cfg(all(test, feature = "sqlite", feature = "metrics"))]
mod tests {
    use axum::{Router, body::Body, http::Request, routing::post};
    use futures_util::FutureExt;
    use metrics_exporter_prometheus::PrometheusBuilder;
    use sqlx::Sqlite;
    use tower::ServiceExt;

    use super::*;
    use crate::layer::report::captured;

    #[test]
    fn a_forgotten_layer_is_logged_with_its_route_and_counted() {
        let app: Router = Router::new()
            .route("/orders/{id}", post(|_: FencedTx<Sqlite>| async {}))
            .route("/items/{id}", post(|_: Admitted| async {}));
        let recorder = PrometheusBuilder::new().build_recorder();
        let answer = |path: &str| {
            let request = Request::post(path).body(Body::empty()).unwrap();
            let answer = app.clone().oneshot(request);
            // The response is ready immediately, because the handler's extractor fails without
            // waiting.
            answer.now_or_never().unwrap().unwrap().status()
        };
        let log = captured(|| {
            ::metrics::with_local_recorder(&recorder, || {
                assert_eq!(answer("/orders/secret"), 500);
                assert_eq!(answer("/items/secret"), 500);
            });
        });
        let lines: Vec<_> = log.lines().collect();
        assert_eq!(lines.len(), 2, "{log}");
        for (line, route) in lines.iter().zip(["/orders/{id}", "/items/{id}"]) {
            assert!(
                line.contains("ERROR") && line.contains("add `.route_layer("),
                "{line}"
            );
            assert!(line.contains(&format!("route=\"{route}\"")), "{line}");
            assert!(!line.contains("secret"), "{line}");
        }
        let counted = recorder.handle().render();
        assert!(
            counted.contains("tower_fence_missing_layer_total 2"),
            "{counted}"
        );
    }
}
