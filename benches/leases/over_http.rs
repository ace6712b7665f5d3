//! Acquire and release over HTTP: the issuer compared with the locks of etcd, with 16 connections.

use std::net::SocketAddr;

use axum::Router;
use tower_fence::{issuer, lease::Leases};

use crate::{
    clients::{Alone, Etcd, Issuer, Session},
    contenders::{ETCD, IN_ETCD, OURS, TASKS, names},
    postgres_store::PostgresStore,
    store::Store,
    support::{
        http, load,
        options::Options,
        program::Program,
        report::Report,
        rounds::{self, Contender},
    },
};

/// Serves an issuer.
pub fn serve<L: Leases>(store: &Store, leases: L) -> SocketAddr {
    let router = issuer::router(leases);
    http::serve(&store.runtime, Router::new().nest("/locks", router))
}

pub fn race(
    store: &Store,
    postgres: &PostgresStore,
    etcd: Option<&Program>,
    options: &Options,
    report: &mut Report,
) {
    const PREFIX: &str = "over-http";
    let title = "Acquire and release, 16 connections, over HTTP";
    if !options.wants(title) {
        return;
    }
    let clients = || (0..TASKS).map(|task| Issuer::new(names(task), Alone));
    let ours = |addr| load::turns(addr, clients().collect());
    let in_redis = serve(store, store.leases(PREFIX));
    let mut contenders = vec![Contender::new(OURS, ours(in_redis))];
    for (name, leases) in postgres.both() {
        contenders.push(Contender::new(name, ours(serve(store, leases))));
    }
    if let Some(etcd) = etcd {
        let in_etcd = serve(store, store.in_etcd(etcd));
        contenders.push(Contender::new(IN_ETCD, ours(in_etcd)));
        for (name, session) in [
            (ETCD, Session::Kept),
            ("etcd, a lease for each lock", Session::ForEachLock),
        ] {
            let clients = (0..TASKS).map(|task| Etcd::new(&names(task), session, Alone));
            let theirs = load::turns(etcd.addr, clients.collect());
            contenders.push(Contender::new(name, theirs));
        }
    }
    let baseline = etcd.map_or(OURS, |_| ETCD);
    let granted_before = postgres.granted();
    let outcomes = rounds::run(title, baseline, contenders, options);
    store.assert_all_free();
    store.assert_granted(PREFIX, &outcomes);
    postgres.assert_all_free();
    postgres.assert_granted_since(granted_before, &outcomes);
    report.contenders(title, baseline, &outcomes);
}
