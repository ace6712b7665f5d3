//! Database URLs that psql accepts.

use std::process::Command;

use sqlx::Postgres;
use tokio::{
    io::copy_bidirectional,
    net::{TcpListener, TcpStream},
};

use super::program::{Served, ended, program, run, run_on};
use crate::support::{database::TestDatabase, eventually, postgres::PostgresServer};

/// Returns a URL of the same server with an IPv6 address.
async fn on_ipv6(url: &str) -> String {
    let mut url = reqwest::Url::parse(url).unwrap();
    let (host, port) = (url.host_str().unwrap().to_owned(), url.port().unwrap());
    let listener = TcpListener::bind("[::1]:0").await.unwrap();
    let own_port = listener.local_addr().unwrap().port();
    url.set_port(Some(own_port)).unwrap();
    url.set_host(Some("[::1]")).unwrap();
    tokio::spawn(async move {
        loop {
            let (mut client, _) = listener.accept().await.unwrap();
            let mut server = TcpStream::connect((host.as_str(), port)).await.unwrap();
            tokio::spawn(async move { copy_bidirectional(&mut client, &mut server).await });
        }
    });
    url.into()
}

#[tokio::test]
async fn a_url_with_harmless_parameters_of_libpq_connects() {
    let db = Postgres::fresh(4).await;
    let url = on_ipv6(&db.url).await;
    // No port, process id or time in the log contains this number.
    let parameters = "connect_timeout=743174317&keepalives_idle=743174317\
                      &target_session_attrs=read-write&client_encoding=auto\
                      &channel_binding=prefer&application_name=till-3";
    let server = Served::start(&format!("{url}?{parameters}"), &[]).await;
    eventually!(
        "the server is ready",
        server.get("/readyz").await.status == 200
    );
    let sql = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'till-3' \
               AND datname = current_database()";
    assert!(db.number(sql).await > 0);
    for parameter in parameters.split('&').take(5) {
        let (name, _) = parameter.split_once('=').unwrap();
        server.logs(name).await;
    }
    let log = server.log();
    for hidden in ["743174317", "application_name"] {
        assert!(!log.contains(hidden), "{log}");
    }
}

#[tokio::test]
async fn url_without_a_user_uses_the_user_of_the_process() {
    let trust = ("pg_hba.conf", &b"host all all 127.0.0.1/32 trust\n"[..]);
    let postgres = PostgresServer::start_with_files(&[trust], &[]).await;
    let user = Command::new("id").arg("-un").output().unwrap().stdout;
    let user = String::from_utf8(user).unwrap().trim().to_owned();
    let mut conn = postgres.connect().await;
    let create = format!("CREATE ROLE \"{user}\" SUPERUSER LOGIN");
    Postgres::run(&mut conn, &create).await;
    let url = format!("postgres://{}/postgres", postgres.addr());
    let mut migrate = program();
    let arguments = ["migrate", "--database-url", &url];
    migrate.args(arguments).env_remove("PGUSER");
    ended(migrate).await.is(0);
    let owned = format!(
        "SELECT count(*) FROM pg_namespace \
         WHERE nspname = 'tower_fence' AND pg_get_userbyid(nspowner) = '{user}'"
    );
    assert_eq!(Postgres::number(&mut conn, &owned).await.unwrap(), 1);
}

#[tokio::test]
async fn unsupported_url_parameters_are_refused_by_name() {
    for (rest, text) in [
        ("db/shop?channel_binding=require", "channel_binding"),
        ("db/shop?service=x7431", "service"),
        ("db/shop?passfile=x7431", "PGPASSFILE"),
        ("db/shop?connection_limit=x7431", "connection_limit"),
        ("db-1,db-2/shop", "several hosts"),
        ("db-1:5432,db-2:5433/shop", "several hosts"),
        ("db/shop?host=db-1,db-2", "several hosts"),
        (
            "db/shop?sslmode=verify-full&sslrootcert=/missing.pem",
            "cannot read /missing.pem",
        ),
        ("db/shop#x7431", "# as %23"),
    ] {
        let url = format!("postgres://till:hunter2@{rest}");
        let refused = run_on(&url, &["migrate"]).await;
        refused.is(78).says(text);
        let shown = !refused.stderr.contains("hunter2") && !refused.stderr.contains("x7431");
        assert!(shown, "{refused:?}");
    }
}

/// sqlx ignores these variables, or an invalid value of them.
#[tokio::test]
async fn unsupported_variables_of_libpq_are_refused() {
    let url = "postgres://till:hunter2@127.0.0.1:1/shop";
    let migrate = async |query: &str, name: &str, value: &str| {
        let url = format!("{url}{query}");
        let variables = [("TOWER_FENCE_DATABASE_URL", &*url), (name, value)];
        run(&["migrate"], &variables).await
    };
    for (name, value, overridden_by) in [
        ("PGSSLMODE", "verify_full", "?sslmode=verify-full"),
        ("PGSSLMODE", "require ", "?sslmode=disable"),
        ("PGCHANNELBINDING", "require", "?channel_binding=prefer"),
        ("PGGSSENCMODE", "require", "?gssencmode=disable"),
        (
            "PGSSLMINPROTOCOLVERSION",
            "TLSv1.3",
            "?ssl_min_protocol_version=TLSv1.2",
        ),
    ] {
        migrate("", name, value).await.is(78).says(name);
        // The URL overrides the variable. No server listens on this port.
        migrate(overridden_by, name, value).await.is(69);
    }
    let no_port = [
        ("TOWER_FENCE_DATABASE_URL", "postgres://127.0.0.1/shop"),
        ("PGPORT", "5433 "),
    ];
    let refused = run(&["migrate"], &no_port).await;
    refused.is(78).says("PGPORT");
    let refused = migrate("", "PGSSLCRL", "/crl.pem").await;
    refused.is(78).says("PGSSLCRL");
    for (query, authority) in [
        ("?sslrootcert=system", "/ca.pem"),
        ("?sslrootcert=system", " "),
        ("?sslrootcert=system", ""),
        ("", "system"),
    ] {
        let refused = migrate(query, "PGSSLROOTCERT", authority).await;
        refused.is(78).says("PGSSLROOTCERT");
    }
    for (name, value) in [
        ("PGSSLMODE", "verify-full"),
        ("PGSSLMODE", " "),
        ("PGCHANNELBINDING", "prefer"),
        ("PGGSSENCMODE", "disable"),
    ] {
        migrate("", name, value).await.is(69);
    }
}
