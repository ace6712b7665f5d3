//! Keys are replaced under load, over two issuers and two fences, and no request is refused. The
//! same load detects a rotation in the wrong order, which begins at the issuers.

use std::{
    collections::BTreeSet,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};

use axum::{Router, routing::post};
use reqwest::{Client, RequestBuilder};
use serde_json::json;
use sqlx::Postgres;
use tokio::{task::JoinSet, time::sleep};
use tower_fence::{
    FenceLayer, PathParam, TokenKey, TokenKeys, header::FencingToken, issuer::Issuer,
    lease::PostgresLeases,
};

use crate::support::{
    database::{Fresh, TestDatabase},
    eventually,
    http::{Answer, Server},
};

const CLIENTS: usize = 8;

/// Four processes, each with its own handle and server.
struct Processes {
    issuers: [(TokenKeys, Server); 2],
    fences: [(TokenKeys, Server); 2],
}

impl Processes {
    async fn start(db: &Fresh<Postgres>, first: &TokenKey) -> Self {
        let keys = || TokenKeys::new([first.clone()]).unwrap();
        let issuer = async || {
            let keys = keys();
            let issuer = Issuer::new(PostgresLeases::new(db.fence())).sign_with(keys.clone());
            (keys, Server::start(issuer.router()).await)
        };
        let fence = async || {
            let keys = keys();
            let layer = FenceLayer::new(db.fence(), PathParam("sku")).verify_with(keys.clone());
            let app = Router::new()
                .route("/{sku}", post(|| async {}))
                .route_layer(layer);
            (keys, Server::start(app).await)
        };
        Self {
            issuers: [issuer().await, issuer().await],
            fences: [fence().await, fence().await],
        }
    }

    /// Replaces the keys of these processes, one after the other.
    async fn replace(processes: &[(TokenKeys, Server)], keys: &[&TokenKey]) {
        for (handle, _) in processes {
            handle.replace(&TokenKeys::new(keys.iter().map(|key| (*key).clone())).unwrap());
            sleep(Duration::from_millis(5)).await;
        }
    }
}

/// Retries the request while the database is too slow, as on a busy machine.
async fn answered(request: impl Fn() -> RequestBuilder) -> Answer {
    loop {
        let answer = Answer::to(request()).await;
        if answer.status != 503 {
            return answer;
        }
        sleep(Duration::from_millis(50)).await;
    }
}

/// Clients that acquire, write and release continuously, each on its own resource.
struct Load {
    stop: Arc<AtomicBool>,
    writes: Arc<[AtomicUsize; CLIENTS]>,
    refused: Arc<AtomicUsize>,
    used: Arc<Mutex<BTreeSet<String>>>,
    clients: JoinSet<()>,
}

impl Load {
    fn start(processes: &Processes) -> Self {
        let mut load = Self {
            stop: Arc::default(),
            writes: Arc::default(),
            refused: Arc::default(),
            used: Arc::default(),
            clients: JoinSet::new(),
        };
        for n in 0..CLIENTS {
            let any = |of: &[(TokenKeys, Server); 2]| [of[0].1.url(""), of[1].1.url("")];
            let (issuers, fences) = (any(&processes.issuers), any(&processes.fences));
            let (stop, writes) = (Arc::clone(&load.stop), Arc::clone(&load.writes));
            let (refused, used) = (Arc::clone(&load.refused), Arc::clone(&load.used));
            load.clients.spawn(async move {
                let client = Client::new();
                while !stop.load(SeqCst) {
                    let pick =
                        |of: &[String; 2]| format!("{}/sku-{n}", of[rand::random_range(0..2)]);
                    let wait = json!({"wait_ms": 10_000});
                    let grant = || client.post(pick(&issuers)).json(&wait);
                    let lease = answered(grant).await;
                    assert_eq!(lease.status, 201, "{lease:?}");
                    let lease = lease.json();
                    let id = lease["lease_id"].as_str().unwrap();
                    // Each client writes a second time, with a new token from either issuer.
                    let mut field = lease["fencing_token"].as_str().unwrap().to_owned();
                    for again in [true, false] {
                        let signed: FencingToken = field.parse().unwrap();
                        used.lock().unwrap().insert(signed.key.unwrap().to_string());
                        sleep(Duration::from_millis(rand::random_range(0..8))).await;
                        let write = || client.post(pick(&fences)).header("Fencing-Token", &field);
                        let answer = answered(write).await;
                        if answer.status != 200 {
                            answer.is_problem(403, "forged-token");
                            refused.fetch_add(1, SeqCst);
                        }
                        if again {
                            let renew = || client.put(pick(&issuers)).header("Lease-Id", id);
                            let renew = || renew().json(&json!({"new_token": true}));
                            let renewed = answered(renew).await.json();
                            field = renewed["fencing_token"].as_str().unwrap().into();
                        }
                    }
                    let release = || client.delete(pick(&issuers)).header("Lease-Id", id);
                    // The status is 409 if an earlier attempt has released the lease and its answer
                    // was lost.
                    assert!(matches!(answered(release).await.status, 204 | 409));
                    writes[n].fetch_add(2, SeqCst);
                }
            });
        }
        load
    }

    /// Waits until the token of every earlier grant has been used up.
    async fn everything_granted_is_used_up(&self) {
        let now = || self.writes.each_ref().map(|count| count.load(SeqCst));
        let before = now();
        eventually("every client continues", async || {
            let pairs = now().into_iter().zip(before);
            pairs.into_iter().all(|(now, before)| now >= before + 4)
        })
        .await;
    }

    async fn stop(mut self) -> (usize, usize, usize) {
        self.stop.store(true, SeqCst);
        while let Some(ended) = self.clients.join_next().await {
            ended.unwrap();
        }
        let writes = self.writes.iter().map(|count| count.load(SeqCst)).sum();
        let used = self.used.lock().unwrap().len();
        (writes, self.refused.load(SeqCst), used)
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rotation_under_load_refuses_no_request() {
    let db = Postgres::fresh(12).await;
    let mut old = TokenKey::random("k0").unwrap();
    let processes = Processes::start(&db, &old).await;
    let load = Load::start(&processes);
    const ROTATIONS: usize = 5;
    for n in 1..=ROTATIONS {
        let new = TokenKey::random(format!("k{n}")).unwrap();
        load.everything_granted_is_used_up().await;
        // These are the steps that the documentation describes.
        Processes::replace(&processes.fences, &[&old, &new]).await;
        Processes::replace(&processes.issuers, &[&new, &old]).await;
        load.everything_granted_is_used_up().await;
        Processes::replace(&processes.fences, &[&new]).await;
        Processes::replace(&processes.issuers, &[&new]).await;
        old = new;
    }
    let (writes, refused, used) = load.stop().await;
    println!("{writes} writes under {used} keys, {refused} refused");
    assert_eq!((refused, used), (0, ROTATIONS + 1));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rotation_in_the_wrong_order_is_noticed() {
    for issuers_first in [true, false] {
        let db = Postgres::fresh(12).await;
        let [old, new] = ["k0", "k1"].map(|id| TokenKey::random(id).unwrap());
        let processes = Processes::start(&db, &old).await;
        let load = Load::start(&processes);
        load.everything_granted_is_used_up().await;
        if issuers_first {
            Processes::replace(&processes.issuers, &[&new]).await;
        } else {
            // The old key is removed too early.
            Processes::replace(&processes.fences, &[&new]).await;
        }
        eventually!("a request is refused", load.refused.load(SeqCst) > 0);
        load.stop().await;
    }
}
