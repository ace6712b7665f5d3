//! URLs of the endpoints. An error names an endpoint by its number and does not quote its URL,
//! which may contain a password.

use reqwest::Url;

/// Parses all endpoints. The error names the invalid endpoint and the reason.
pub(crate) fn parse_all<E: AsRef<str>>(urls: &[E]) -> Result<Box<[Url]>, String> {
    let count = urls.len();
    if count == 0 {
        return Err("the list of endpoints is empty".into());
    }
    let endpoints = urls.iter().zip(1..).map(|(url, number)| {
        parse(url.as_ref()).map_err(|reason| format!("endpoint {number} of {count} {reason}"))
    });
    endpoints.collect()
}

fn parse(url: &str) -> Result<Url, &'static str> {
    let url = Url::parse(url)
        .map_err(|_| "is not a valid URL (expected one such as `https://etcd-1:2379`)")?;
    if !matches!(url.scheme(), "http" | "https") {
        return Err("does not begin with http:// or https://");
    }
    if !url.username().is_empty() || url.password().is_some() {
        return Err("contains a user: set it with `user`");
    }
    if url.query().is_some() {
        return Err("contains a query");
    }
    if url.fragment().is_some() {
        return Err("contains a fragment");
    }
    Ok(url)
}

/// Returns the URL of a method of etcd. Its path follows that of the endpoint.
pub(crate) fn method(endpoint: &Url, path: &str) -> Url {
    let mut url = endpoint.clone();
    let base = endpoint.path().trim_end_matches('/');
    url.set_path(&format!("{base}{path}"));
    url
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn method_follows_the_path_of_its_endpoint() {
        for (endpoint, expected) in [
            ("http://a:2379", "http://a:2379/v3/kv/txn"),
            ("http://a:2379/", "http://a:2379/v3/kv/txn"),
            ("https://a/etcd", "https://a/etcd/v3/kv/txn"),
            ("https://a/b%20c/etcd//", "https://a/b%20c/etcd/v3/kv/txn"),
        ] {
            let endpoint = parse(endpoint).unwrap();
            assert_eq!(method(&endpoint, "/v3/kv/txn").as_str(), expected);
        }
    }
}
