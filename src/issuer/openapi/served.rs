//! Serves the document from the router that it describes.

use std::{mem, sync::Arc};

use axum::{
    Json, Router,
    extract::{OriginalUri, Request},
    middleware::{self, Next},
    response::{IntoResponse, Response},
};
use http::Method;
use utoipa::openapi::OpenApi;

/// The path of the document.
pub(super) const DOCUMENT: &str = "/openapi.json";

/// Serves the document in place of the state of the resource `openapi.json`.
pub(in crate::issuer) fn serve<S: Clone + Send + Sync + 'static>(
    router: Router<S>,
    document: Option<OpenApi>,
) -> Router<S> {
    let Some(document) = document.map(Arc::new) else {
        return router;
    };
    router.route_layer(middleware::from_fn(move |request: Request, next: Next| {
        let document = Arc::clone(&document);
        async move {
            let reads = matches!(*request.method(), Method::GET | Method::HEAD);
            if !reads || request.uri().path() != DOCUMENT {
                return next.run(request).await;
            }
            answer(&document, request.extensions().get())
        }
    }))
}

/// Returns the document with the prefix at which the router is nested.
fn answer(document: &OpenApi, uri: Option<&OriginalUri>) -> Response {
    let path = uri.map_or(DOCUMENT, |OriginalUri(uri)| uri.path());
    let prefix = path.strip_suffix(DOCUMENT).unwrap_or_default();
    let mut api = document.clone();
    let paths = mem::take(&mut api.paths.paths).into_iter();
    let nested = paths.map(|(path, item)| match path.as_str() {
        "/" if !prefix.is_empty() => (prefix.to_owned(), item),
        path => (format!("{prefix}{path}"), item),
    });
    api.paths.paths = nested.collect();
    Json(api).into_response()
}
