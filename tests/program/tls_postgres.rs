//! TLS to the Postgres server that contains the fence.

use std::fs;

use serde_json::json;
use sqlx::{Connection, PgConnection, Postgres};

use super::program::{Ended, Served, name, run, run_on};
use crate::support::{
    certificates::Certificates, database::TestDatabase, postgres::PostgresServer,
};

/// Access rules that refuse connections without TLS.
const TLS_ONLY: &[u8] = b"hostssl all all 127.0.0.1/32 scram-sha-256\n";

/// Starts a Postgres that presents the server certificate of `certificates`.
async fn postgres_with(certificates: &Certificates) -> PostgresServer {
    let [cert, key] =
        ["server.pem", "server.key"].map(|file| fs::read(certificates.path(file)).unwrap());
    let files = [
        ("server.crt", &cert[..]),
        ("server.key", &key),
        ("pg_hba.conf", TLS_ONLY),
    ];
    PostgresServer::start_with_files(&files, &["ssl=on"]).await
}

/// Returns the URL of the database of this Postgres with this host, this TLS mode, and this
/// authority.
fn url(postgres: &PostgresServer, host: &str, mode: &str, authority: &Certificates) -> String {
    let mut url = reqwest::Url::parse(&postgres.url("postgres")).unwrap();
    url.set_host(Some(host)).unwrap();
    let authority = authority.path("authority.pem");
    url.query_pairs_mut()
        .append_pair("sslmode", mode)
        .append_pair("sslrootcert", name(&authority));
    url.into()
}

fn password(url: &str) -> String {
    let url = reqwest::Url::parse(url).unwrap();
    url.password().unwrap().to_owned()
}

/// Runs a command on this database.
async fn with_database(arguments: &[&str], url: &str) -> Ended {
    let ended = run_on(url, arguments).await;
    let shown = format!("{}{}", ended.stdout, ended.stderr);
    assert!(!shown.contains(&password(url)), "{shown}");
    ended
}

#[tokio::test]
async fn all_postgres_connections_of_the_program_use_tls() {
    let certificates = Certificates::make();
    let postgres = postgres_with(&certificates).await;
    let url = url(&postgres, "127.0.0.1", "verify-full", &certificates);
    with_database(&["migrate"], &url).await.is(0);
    let server = Served::start(&url, &[]).await;
    let granted = server.post("/locks/sku-1", &json!({})).await;
    assert_eq!(granted.status, 201, "{granted:?}{}", server.log());
    let mut conn = PgConnection::connect(&url).await.unwrap();
    let mut connections = async |with_tls: bool| {
        let sql = format!(
            "SELECT count(*) FROM pg_stat_ssl JOIN pg_stat_activity USING (pid) \
             WHERE application_name = 'tower-fence' AND ssl = {with_tls}"
        );
        Postgres::number(&mut conn, &sql).await.unwrap()
    };
    // This request uses a connection of the pool and the connection of the listener.
    let waiting = json!({"wait_ms": 1_000});
    let held = server.post("/locks/sku-1", &waiting).await;
    held.is_problem(409, "lock-held");
    assert!(connections(true).await >= 2);
    assert_eq!(connections(false).await, 0);
    let reset = ["reset", "sku-1", "--to", "1000000001", "--yes"];
    with_database(&reset, &url).await.is(0);
    let direct = ["run", "--direct", "--resource", "sku-2", "--", "true"];
    with_database(&direct, &url).await.is(0);
}

#[tokio::test]
async fn untrusted_postgres_is_not_written_to() {
    let (certificates, others) = (Certificates::make(), Certificates::make());
    let postgres = postgres_with(&certificates).await;
    // The certificate is valid only for the address.
    let of_the_name = url(&postgres, "localhost", "verify-full", &certificates);
    let of_others = url(&postgres, "127.0.0.1", "verify-full", &others);
    // Although this mode does not require verification, libpq verifies the certificate if an
    // authority is given.
    let require_of_others = url(&postgres, "127.0.0.1", "require", &others);
    for (url, why) in [
        (&of_others, "invalid peer certificate"),
        (&require_of_others, "invalid peer certificate"),
        (&of_the_name, "localhost"),
    ] {
        with_database(&["migrate"], url).await.is(69).says(why);
        // The server starts although it cannot connect to its database, and is not ready.
        let server = Served::start(url, &[]).await;
        server.logs(why).await;
        assert_eq!(server.get("/readyz").await.status, 503);
        let refused = server.post("/locks/sku-1", &json!({})).await;
        refused.is_problem(503, "store-unavailable");
        assert!(!server.log().contains(&password(url)), "{}", server.log());
    }
    // A variable may name the authority as well.
    let required = format!("{}?sslmode=require", postgres.url("postgres"));
    let authority = others.path("authority.pem");
    let variables = [
        ("TOWER_FENCE_DATABASE_URL", required.as_str()),
        ("PGSSLROOTCERT", name(&authority)),
    ];
    let refused = run(&["migrate"], &variables).await;
    refused.is(69).says("invalid peer certificate");
    // These modes do not compare the host name.
    for mode in ["verify-ca", "require"] {
        let any_name = url(&postgres, "localhost", mode, &certificates);
        with_database(&["migrate"], &any_name).await.is(0);
    }
}

#[tokio::test]
async fn required_tls_is_enforced_by_both_sides() {
    let certificates = Certificates::make();
    let postgres = postgres_with(&certificates).await;
    let plain = url(&postgres, "127.0.0.1", "disable", &certificates);
    let refused = with_database(&["migrate"], &plain).await;
    refused.is(69).says("no encryption");
    // Without a mode, TLS is used if the server offers it.
    let optional = postgres.url("postgres");
    with_database(&["migrate"], &optional).await.is(0);
    // This Postgres has no TLS. An attacker on the network path could make any Postgres appear to
    // have none.
    let without = Postgres::fresh(2).await;
    for mode in ["require", "verify-full"] {
        let demanded = format!("{}?sslmode={mode}", without.url);
        let refused = with_database(&["migrate"], &demanded).await;
        refused.is(69).says("TLS");
    }
}
