//! Acquire and release over HTTP: the issuer beside etcd's lock, 16 connections.

use std::net::SocketAddr;

use axum::Router;
use tower_fence::issuer;

use crate::{
    clients::{Alone, Etcd, Issuer, Session},
    contenders::{OURS, TASKS, names},
    store::Store,
    support::{
        http, load,
        options::Options,
        program::Program,
        report::Report,
        rounds::{self, Contender},
    },
};

/// Serves the issuer.
pub fn serve(store: &Store, prefix: &str) -> SocketAddr {
    let router = issuer::router(store.leases(prefix));
    http::serve(&store.runtime, Router::new().nest("/locks", router))
}

pub fn race(store: &Store, etcd: Option<&Program>, options: &Options, report: &mut Report) {
    const PREFIX: &str = "over-http";
    let title = "Acquire and release, 16 connections, over HTTP";
    if !options.wants(title) {
        return;
    }
    let addr = serve(store, PREFIX);
    let clients = (0..TASKS).map(|task| Issuer::new(names(task), Alone));
    let ours = load::turns(addr, clients.collect());
    let mut contenders = vec![Contender::new(OURS, ours)];
    if let Some(etcd) = etcd {
        for (name, session) in [
            ("etcd, one session", Session::Kept),
            ("etcd, a lease for each lock", Session::ForEachLock),
        ] {
            let clients = (0..TASKS).map(|task| Etcd::new(&names(task), session, Alone));
            let theirs = load::turns(etcd.addr, clients.collect());
            contenders.push(Contender::new(name, theirs));
        }
    }
    let outcomes = rounds::run(title, OURS, contenders, options);
    store.assert_all_free();
    store.assert_granted(PREFIX, &outcomes);
    report.contenders(title, OURS, &outcomes);
}
