//! The calls of the issuer over real HTTP, with every store.

use serde_json::json;

use crate::support::{
    http::{Answer, Server, lasts_ms},
    store::TestStore,
};

on_every_store!(lease_is_acquired_renewed_and_released,);

async fn lease_is_acquired_renewed_and_released<S: TestStore>() {
    let (leases, _, _db) = S::fresh().await;
    let server = Server::issuer(leases).await;
    let path = "/locks/caf%C3%A9%2F1";
    assert_eq!(
        server.inspect(path).await,
        json!({ "resource": "café/1", "held": false })
    );

    let answer = server
        .acquire(path, json!({ "ttl_ms": 20_000, "owner": "worker-7" }))
        .await;
    assert_eq!(answer.status, 201);
    assert_eq!(answer.headers["cache-control"], "no-store");
    let mut lease = answer.json();
    lasts_ms(&mut lease, 20_000);
    let (id, token) = (
        lease["lease_id"].as_str().unwrap(),
        lease["token"].as_i64().unwrap(),
    );
    assert_eq!(
        lease,
        json!({
            "resource": "café/1",
            "lease_id": id,
            "token": token,
            "fencing_token": format!("{token};resource=%\"caf%c3%a9/1\""),
            "ttl_ms": null,
        })
    );
    assert_eq!(
        answer.headers["fencing-token"],
        lease["fencing_token"].as_str().unwrap()
    );

    let mut held = server.inspect(path).await;
    // The time has the form 2026-11-25T22:33:24Z.
    let granted_at = held.as_object_mut().unwrap().remove("granted_at");
    assert_eq!(granted_at.is_some(), S::HAS_GRANT_TIME, "{granted_at:?}");
    if let Some(granted_at) = granted_at {
        let text = granted_at.as_str().unwrap();
        assert!(text.len() == 20 && text.ends_with('Z'), "{text}");
    }
    let left = held["ttl_ms"].take().as_u64().unwrap();
    assert!((10_000..=20_000).contains(&left), "{left}");
    let expected = json!({
        "resource": "café/1",
        "held": true,
        "token": token,
        "owner": "worker-7",
        "ttl_ms": null,
        "waiters": 0,
    });
    assert_eq!(held, expected);

    let refused = server.acquire(path, json!({})).await;
    let problem = refused.is_problem(409, "lock-held");
    assert_eq!(problem["resource"], "café/1");
    let left = problem["retry_after_ms"].as_u64().unwrap();
    assert!((10_000..=20_000).contains(&left), "{left}");
    let seconds = left.div_ceil(1_000).to_string();
    assert_eq!(refused.headers["retry-after"], seconds);

    let renewed = server.renew(path, id, json!({ "ttl_ms": 40_000 })).await;
    assert_eq!(renewed.status, 200);
    assert_eq!(
        renewed.headers["fencing-token"],
        answer.headers["fencing-token"]
    );
    let mut renewed = renewed.json();
    lasts_ms(&mut renewed, 40_000);
    assert_eq!(renewed, lease);
    let renewed = server.renew(path, id, json!({ "new_token": true })).await;
    let latest = renewed.json();
    assert!(latest["token"].as_i64() > Some(token));
    let field = latest["fencing_token"].as_str().unwrap();
    assert_eq!(renewed.headers["fencing-token"], field);
    let kept = server.renew(path, id, json!({ "new_token": false })).await;
    assert_eq!(kept.json()["token"], latest["token"]);

    let released = server.release(path, id).await;
    assert_eq!((released.status, released.text.as_str()), (204, ""));
    let problem = server.release(path, id).await.is_problem(409, "lease-lost");
    assert_eq!(problem["resource"], "café/1");
    let problem = server
        .renew(path, id, json!({}))
        .await
        .is_problem(409, "lease-lost");
    assert_eq!(problem["resource"], "café/1");

    // Every member is optional, and so is the body.
    let next = Answer::to(server.post(path)).await;
    assert_eq!(next.status, 201);
    let mut next = next.json();
    lasts_ms(&mut next, 30_000);
    assert!(next["token"].as_i64() > latest["token"].as_i64());
}
