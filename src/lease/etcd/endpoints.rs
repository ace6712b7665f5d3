//! The URLs of the endpoints. Where one is none, the error has its place among them, and nothing of the URL: it may have a
//! password in it.

use reqwest::Url;

/// Reads all endpoints. The error says which one is none, and why.
pub(super) fn parse_all<E: AsRef<str>>(urls: &[E]) -> Result<Box<[Url]>, String> {
    let count = urls.len();
    if count == 0 {
        return Err("there is no endpoint".into());
    }
    let endpoints = urls.iter().zip(1..).map(|(url, place)| {
        parse(url.as_ref()).map_err(|reason| format!("endpoint {place} of {count} {reason}"))
    });
    endpoints.collect()
}

fn parse(url: &str) -> Result<Url, &'static str> {
    let url = Url::parse(url).map_err(|_| "is no URL, as `https://etcd-1:2379` is one")?;
    if !matches!(url.scheme(), "http" | "https") {
        return Err("does not begin with http:// or https://");
    }
    if !url.username().is_empty() || url.password().is_some() {
        return Err("has a user in it: name the user to the builder (`user`)");
    }
    if url.query().is_some() {
        return Err("has a query");
    }
    if url.fragment().is_some() {
        return Err("has a fragment");
    }
    Ok(url)
}

/// The URL of a method of etcd's: its path behind that of the endpoint.
pub(super) fn method(endpoint: &Url, path: &str) -> Url {
    let mut url = endpoint.clone();
    let base = endpoint.path().trim_end_matches('/');
    url.set_path(&format!("{base}{path}"));
    url
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_method_stands_behind_the_path_of_its_endpoint() {
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
