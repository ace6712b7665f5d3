//! The files of the page, and the headers that restrict them in a browser.

use axum::{
    extract::{OriginalUri, Path},
    response::{IntoResponse, Response},
};
use http::{
    HeaderName, HeaderValue, StatusCode,
    header::{
        CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, REFERRER_POLICY,
        X_CONTENT_TYPE_OPTIONS,
    },
};
use serde::Deserialize;

/// Prevents caches from storing a response.
pub(super) const NO_STORE: (HeaderName, HeaderValue) =
    (CACHE_CONTROL, HeaderValue::from_static("no-store"));

const INDEX: &str = include_str!("page/index.html");

/// The files that the page loads, with their content types.
const FILES: [(&str, &str, &str); 11] = [
    ("api.js", SCRIPT, include_str!("page/api.js")),
    ("charts.js", SCRIPT, include_str!("page/charts.js")),
    (
        "console.css",
        "text/css; charset=utf-8",
        include_str!("page/console.css"),
    ),
    ("console.js", SCRIPT, include_str!("page/console.js")),
    ("dialogs.js", SCRIPT, include_str!("page/dialogs.js")),
    ("events.js", SCRIPT, include_str!("page/events.js")),
    ("fences.js", SCRIPT, include_str!("page/fences.js")),
    ("leases.js", SCRIPT, include_str!("page/leases.js")),
    ("live.js", SCRIPT, include_str!("page/live.js")),
    ("pager.js", SCRIPT, include_str!("page/pager.js")),
    ("words.js", SCRIPT, include_str!("page/words.js")),
];
const SCRIPT: &str = "text/javascript; charset=utf-8";

/// Serves the page. If the URL of the page has no trailing slash, the URLs of its files begin with
/// the last segment of the path.
pub(super) async fn index(OriginalUri(uri): OriginalUri) -> Response {
    let base = match uri.path().rsplit_once('/') {
        Some((_, "")) | None => "./".to_owned(),
        // Without `./`, a segment such as `javascript:a` would be read as a scheme.
        Some((_, last)) => format!("./{}/", escaped(last)),
    };
    let html = INDEX.replace("{base}", &base);
    serve("text/html; charset=utf-8", html)
}

/// The file name in the path. The rest of the path may contain parameters of the application.
#[derive(Deserialize)]
pub(super) struct FileName {
    file: String,
}

/// Serves a file of the page.
pub(super) async fn file(Path(FileName { file: name }): Path<FileName>) -> Response {
    match FILES.iter().find(|(file, ..)| *file == name) {
        Some((_, content_type, text)) => serve(content_type, (*text).to_owned()),
        None => StatusCode::NOT_FOUND.into_response(),
    }
}

/// Escapes a string for use in an attribute value.
fn escaped(text: &str) -> String {
    let text = text.replace('&', "&amp;").replace('"', "&quot;");
    text.replace('<', "&lt;").replace('>', "&gt;")
}

/// Serves a document that no cache stores, so that every request passes the authentication.
fn serve(content_type: &'static str, text: String) -> Response {
    (
        [
            NO_STORE,
            (CONTENT_TYPE, HeaderValue::from_static(content_type)),
        ],
        text,
    )
        .into_response()
}

/// Adds headers that allow the page to load files from this origin only, and to send requests only
/// to this origin. Even if the page had an injection bug, a script in the name of a resource or an
/// owner would not run.
pub(super) async fn protect(mut response: Response) -> Response {
    const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; \
         img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";
    let headers = response.headers_mut();
    for (name, value) in [
        (CONTENT_SECURITY_POLICY, POLICY),
        (X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (REFERRER_POLICY, "no-referrer"),
        (
            HeaderName::from_static("cross-origin-resource-policy"),
            "same-origin",
        ),
        (
            HeaderName::from_static("cross-origin-opener-policy"),
            "same-origin",
        ),
    ] {
        headers.insert(name, HeaderValue::from_static(value));
    }
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn index_at(uri: &str) -> String {
        let uri = OriginalUri(uri.parse().unwrap());
        let body = index(uri).await.into_body();
        let bytes = axum::body::to_bytes(body, usize::MAX).await.unwrap();
        String::from_utf8(bytes.to_vec()).unwrap()
    }

    #[tokio::test]
    async fn assets_are_found_with_and_without_a_trailing_slash() {
        for (uri, script) in [
            ("/console/", "src=\"./console.js\""),
            ("/console", "src=\"./console/console.js\""),
            ("/ops/console?a=/b", "src=\"./console/console.js\""),
            ("/", "src=\"./console.js\""),
            // The client chooses the value of a path parameter.
            ("/javascript:a", "src=\"./javascript:a/console.js\""),
            ("/a\"b&quot;", "src=\"./a&quot;b&amp;quot;/console.js\""),
        ] {
            let page = index_at(uri).await;
            assert!(page.contains(script), "{uri}: {page}");
        }
    }

    #[test]
    fn page_has_no_inline_code_and_no_missing_file() {
        for word in [
            "style=",
            "<style",
            "onclick",
            "javascript:",
            "http:",
            "https:",
        ] {
            assert!(!INDEX.contains(word), "{word}");
        }
        for (_, rest) in INDEX
            .match_indices("{base}")
            .map(|(at, _)| INDEX.split_at(at + 6))
        {
            let (name, _) = rest.split_once('"').unwrap();
            assert!(FILES.iter().any(|(file, ..)| *file == name), "{name}");
        }
        for (name, _, text) in FILES {
            // The namespace of SVG is only a name, and is not loaded.
            let text = text.replace("http://www.w3.org/2000/svg", "");
            for word in [
                "innerHTML",
                "outerHTML",
                "insertAdjacentHTML",
                "eval(",
                "://",
            ] {
                assert!(!text.contains(word), "{name}: {word}");
            }
        }
    }

    #[tokio::test]
    async fn other_files_are_not_served() {
        let get = async |name: &str| file(Path(FileName { file: name.into() })).await.status();
        assert_eq!(get("console.js").await, StatusCode::OK);
        assert_eq!(get("../mod.rs").await, StatusCode::NOT_FOUND);
    }
}
