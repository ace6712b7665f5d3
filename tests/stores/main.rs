//! The other lease stores: etcd, Redis Cluster, a quorum of Redis servers, and an issuer over HTTP.
//! Also tokens of third-party lock servers.

macro_rules! on_every_store {
    ($($name:ident),* $(,)?) => {
        crate::support::store::on_store!(on_a_cluster: Cluster, $($name),*);
        crate::support::store::on_store!(on_a_quorum: Quorum, $($name),*);
        crate::support::store::on_store!(on_etcd: Etcd, $($name),*);
        crate::support::store::on_store!(over_http: Http, $($name),*);
    };
}

macro_rules! on_every_store_with_a_queue {
    ($($name:ident),* $(,)?) => {
        crate::support::store::on_store!(on_a_cluster: Cluster, $($name),*);
        crate::support::store::on_store!(on_etcd: Etcd, $($name),*);
        crate::support::store::on_store!(over_http: Http, $($name),*);
    };
}

mod announced_above;
mod doubt;
mod dropped_outside;
mod etcd;
#[path = "../every_store/mod.rs"]
mod every_store;
mod grant_load;
mod others;
mod quorum;
mod redis;

#[macro_use]
extern crate tower_fence_tests as support;
