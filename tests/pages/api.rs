//! The API of the console, on both databases.

use std::time::Duration;

use reqwest::Url;
use serde_json::{Value, json};
use tower_fence::{
    Resource, TokenUse,
    lease::{Acquire, Leases, Owner},
};

use super::service::{OnSqlite, Service};
use crate::support::{
    database::{TestDatabase, on_both_databases},
    eventually,
    fence::token,
};

on_both_databases!(
    leases_are_listed_searched_and_broken,
    resource_lookup_shows_lease_and_fence,
    fences_are_listed_by_name_page_by_page,
    floors_are_listed,
    fence_is_not_reset_below_a_grant,
    invalid_values_are_named,
);

const LONG: Duration = Duration::from_secs(60);

fn resource(name: &str) -> Resource {
    Resource::new(name).unwrap()
}

/// Returns a path with a query, whose values are escaped.
fn path(of: &str, query: &[(&str, &str)]) -> String {
    let url = Url::parse_with_params(&format!("http://a/api/{of}"), query).unwrap();
    format!("api/{of}?{}", url.query().unwrap())
}

fn names(rows: &Value) -> Vec<&str> {
    let rows = rows.as_array().unwrap().iter();
    rows.map(|row| row["resource"].as_str().unwrap()).collect()
}

async fn leases_are_listed_searched_and_broken<DB: TestDatabase>() {
    let service = Service::<DB>::start().await;
    for (name, owner) in [("sku-1", "Anna"), ("sku-2", "bert"), ("other", "Annette")] {
        let owner = Owner::new(owner).unwrap();
        let grant = Acquire::new(LONG).owner(owner);
        service
            .leases
            .acquire(&resource(name), grant)
            .await
            .unwrap();
    }
    let page = service.get("api/leases?limit=1").await;
    assert_eq!(page.headers["cache-control"], "no-store");
    assert!(!page.text.contains("lease_id") && !page.text.contains("\"id\""));
    let page = page.json();
    assert_eq!(page["leases"].as_array().unwrap().len(), 1);
    let next = path("leases", &[("cursor", page["cursor"].as_str().unwrap())]);
    let rest = service.get(&next).await.json();
    assert_eq!(names(&rest["leases"]).len(), 2);

    let found = service.get("api/leases?search=ann").await.json();
    let mut owners = names(&found["leases"]);
    owners.sort_unstable();
    assert_eq!(owners, ["other", "sku-1"]);
    assert_eq!(
        (&found["examined"], &found["cursor"]),
        (&json!(3), &Value::Null)
    );

    let held = async || service.leases.inspect(&resource("sku-1")).await.unwrap();
    let held_token = held().await.unwrap().token.get();
    let end = async |token: i64| {
        let body = json!({ "resource": "sku-1", "token": token });
        service.post("api/break", body).await
    };
    // The token is not that of the lease that the operator has seen.
    end(held_token + 1).await.is_problem(409, "lease-lost");
    assert!(held().await.is_some());
    assert_eq!(end(held_token).await.status, 204);
    assert!(held().await.is_none());
    end(held_token).await.is_problem(409, "lease-lost");
}

async fn resource_lookup_shows_lease_and_fence<DB: TestDatabase>() {
    let service = Service::<DB>::start().await;
    // The name is a query parameter, because a browser would resolve the path segment `..`.
    for name in ["sku-1", "..", "a/b?c#d%", "\u{202e}<b>"] {
        let fence_path = path("fence", &[("resource", name)]);
        let known = service.get(&fence_path).await.json();
        assert_eq!(known["resource"], name);
        assert_eq!(
            (&known["row"], &known["max_token"]),
            (&Value::Null, &json!(0))
        );
        assert_eq!(known["held_lease"], Value::Null);

        let lock = Url::parse("http://a/locks").unwrap();
        let mut lock = lock;
        lock.path_segments_mut().unwrap().push(name);
        let lease = match name {
            // The URL of a lock cannot contain this name.
            ".." => {
                service
                    .leases
                    .acquire(&resource(name), Acquire::new(LONG))
                    .await
                    .unwrap()
                    .token
            }
            _ => {
                let body = json!({ "owner": "worker-a" });
                let answer = service.server.acquire(lock.path(), body).await.json();
                token(answer["token"].as_i64().unwrap())
            }
        };
        service.fence.raise(&resource(name), lease).await.unwrap();
        let known = service.get(&fence_path).await.json();
        assert_eq!(known["max_token"], lease.get() - 1);
        assert_eq!(known["row"]["max_token"], lease.get() - 1);
        assert!(
            known["row"]["idle_ms"].as_u64().unwrap() < 60_000,
            "{known}"
        );
        assert_eq!(known["held_lease"]["token"], lease.get());
        // The number before the first token of the last epoch.
        assert_eq!(
            known["granted"],
            lease.get() / 1_000_000_000 * 1_000_000_000
        );
        assert!(known["held_lease"]["granted_at"].is_string(), "{known}");
    }
}

async fn fences_are_listed_by_name_page_by_page<DB: TestDatabase>() {
    let service = Service::<DB>::start().await;
    let mut expected = vec![
        "a",
        "sku-1",
        "sku-10",
        "sku-2",
        "sku-\u{10ffff}\u{10ffff}",
        "sku.",
        "z",
        "é",
    ];
    for name in &expected {
        service
            .fence
            .raise(&resource(name), token(8))
            .await
            .unwrap();
    }
    expected.sort_unstable();
    let list = async |query: &[(&str, &str)]| service.get(&path("fences", query)).await.json();
    let all = list(&[("limit", "50")]).await;
    assert_eq!(
        (names(&all["fences"]), &all["after"]),
        (expected.clone(), &Value::Null)
    );

    let mut paged = vec![];
    let mut after = String::new();
    loop {
        let page = list(&[("limit", "3"), ("after", &after)]).await;
        paged.extend(names(&page["fences"]).iter().map(ToString::to_string));
        match page["after"].as_str() {
            Some(next) => after = next.to_owned(),
            None => break,
        }
    }
    assert_eq!(paged, expected);
    let skus = list(&[("limit", "50"), ("prefix", "sku-")]).await;
    assert_eq!(
        names(&skus["fences"]),
        ["sku-1", "sku-10", "sku-2", "sku-\u{10ffff}\u{10ffff}"]
    );
    let ones = list(&[("limit", "50"), ("prefix", "sku-1"), ("after", "sku-1")]).await;
    assert_eq!(names(&ones["fences"]), ["sku-10"]);
    assert_eq!(ones["fences"][0]["max_token"], 7);
    assert_eq!(ones["fences"][0]["announced"], Value::Null);
}

async fn floors_are_listed<DB: TestDatabase>() {
    let service = Service::<DB>::start().await;
    assert_eq!(service.get("api/floors").await.json(), json!([]));
    let sku = resource("sku-1");
    let tx = service.fence.begin(&sku, token(7), TokenUse::SingleUse);
    tx.await.unwrap().commit().await.unwrap();
    eventually!(
        "the row is removed",
        service.fence.remove_idle(Duration::ZERO, 10).await.unwrap() == 1
    );
    let floors = service.get("api/floors").await.json();
    let known = service.get("api/fence?resource=sku-1").await.json();
    let expected = json!([{ "partition": known["partition"], "floor": 7 }]);
    assert_eq!(floors, expected);
    assert_eq!(
        (&known["floor"], &known["max_token"], &known["row"]),
        (&json!(7), &json!(7), &Value::Null)
    );
}

async fn fence_is_not_reset_below_a_grant<DB: TestDatabase>() {
    let service = Service::<DB>::start().await;
    let lease = service
        .leases
        .acquire(&resource("sku-1"), Acquire::new(LONG))
        .await
        .unwrap();
    let forged = token(900_000_000_000_000);
    service
        .fence
        .raise(&resource("sku-1"), forged)
        .await
        .unwrap();
    let reset = async |token: i64| {
        let body = json!({ "resource": "sku-1", "token": token });
        service.post("api/reset", body).await
    };
    let refused = reset(7).await;
    assert_eq!(refused.status, 409);
    assert!(
        refused.json()["detail"]
            .as_str()
            .unwrap()
            .contains("or above")
    );
    assert_eq!(
        service.fence.inspect(&resource("sku-1")).await.unwrap(),
        Some(forged.get() - 1)
    );
    assert_eq!(reset(lease.token.get()).await.status, 204);
    assert_eq!(
        service.fence.inspect(&resource("sku-1")).await.unwrap(),
        Some(lease.token.get())
    );
}

async fn invalid_values_are_named<DB: TestDatabase>() {
    let service = Service::<DB>::start().await;
    let long = "a".repeat(256);
    for (asked, field) in [
        (path("leases", &[("limit", "0")]), "limit"),
        (path("leases", &[("limit", "251")]), "limit"),
        (path("leases", &[("limit", "x")]), "query"),
        (path("leases", &[("cursor", "x")]), "cursor"),
        (path("fence", &[("resource", "")]), "resource"),
        (path("fence", &[("resource", &long)]), "resource"),
        (path("fence", &[("name", "a")]), "query"),
        (path("fences", &[("limit", "-1")]), "query"),
        (path("fences", &[("after", &long)]), "after"),
        (path("fences", &[("prefix", "a\0")]), "prefix"),
    ] {
        let problem = service.get(&asked).await.is_problem(422, "invalid-request");
        assert_eq!(problem["field"], field, "{asked}");
    }
    for (call, body) in [
        ("api/break", json!({ "resource": "a" })),
        ("api/break", json!({ "resource": "", "token": 1 })),
        ("api/reset", json!({ "resource": "a", "token": 0 })),
        ("api/reset", json!({ "resource": "a", "token": 1.5 })),
        (
            "api/reset",
            json!({ "resource": "a", "token": 1, "force": true }),
        ),
    ] {
        let problem = service
            .post(call, body)
            .await
            .is_problem(422, "invalid-request");
        assert_eq!(problem["field"], "body");
    }
    let huge = json!({ "resource": "a".repeat(5_000), "token": 1 });
    service
        .post("api/reset", huge)
        .await
        .is_problem(413, "body-too-large");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn search_among_many_leases_reads_one_part_per_request() {
    let service = OnSqlite::start().await;
    for number in 0..50_000 {
        let name = resource(&format!("many-{number}"));
        service
            .leases
            .acquire(&name, Acquire::new(LONG))
            .await
            .unwrap();
    }
    let (mut examined, mut found, mut pages) = (0, 0, 0);
    let mut cursor = String::new();
    loop {
        let asked = path("leases", &[("search", "-4242"), ("cursor", &cursor)]);
        let page = service.get(&asked).await.json();
        let more = page["examined"].as_u64().unwrap();
        assert!(more <= 21_000, "{more}");
        examined += more;
        found += page["leases"].as_array().unwrap().len();
        pages += 1;
        match page["cursor"].as_str() {
            Some(next) => cursor = next.to_owned(),
            None => break,
        }
    }
    assert_eq!(examined, 50_000);
    // The matches are 4242, and 42420 to 42429.
    assert_eq!((found, pages), (11, 3));
    // If most leases match, few are examined.
    let page = service.get("api/leases?search=many").await.json();
    assert_eq!(page["examined"], 50);
}
