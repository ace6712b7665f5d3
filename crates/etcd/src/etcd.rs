//! etcd as this store uses it, and its transactions.

use std::sync::Once;

use serde_json::{Value, json};

use crate::{
    error::EtcdError,
    gateway::{Gateway, To},
    keys::Keys,
    memory::Memory,
    messages::{TxnAnswer, get},
};

/// Maximum number of attempts of a step. Each further attempt means that another request has
/// changed the resource in between.
pub(crate) const ATTEMPTS: usize = 64;

/// Client of etcd, with the keys of this store and the data in memory.
pub(crate) struct Etcd {
    pub(crate) gateway: Gateway,
    pub(crate) keys: Keys,
    pub(crate) memory: Memory,
    /// Whether the warning that etcd does not report the length of its log was logged.
    pub(crate) status_warning: Once,
}

impl Etcd {
    /// Checks that etcd responds, and that the user may read the keys.
    pub(crate) async fn check(&self) -> Result<(), EtcdError> {
        let read = get(&self.keys.incarnation());
        self.read(&[read]).await.map(drop)
    }

    /// Executes a transaction: `success` if all comparisons hold, and otherwise `failure`.
    pub(crate) async fn txn(
        &self,
        to: To,
        compare: &[Value],
        success: &[Value],
        failure: &[Value],
    ) -> Result<TxnAnswer, EtcdError> {
        let body = json!({ "compare": compare, "success": success, "failure": failure });
        self.checked(self.gateway.call(to, "/v3/kv/txn", &body).await?)
    }

    /// Reads in one transaction.
    pub(crate) async fn read(&self, reads: &[Value]) -> Result<TxnAnswer, EtcdError> {
        self.txn(To::Any, &[], reads, &[]).await
    }

    /// Refuses a response without a cluster id, which does not come from etcd.
    pub(crate) fn checked(&self, answer: TxnAnswer) -> Result<TxnAnswer, EtcdError> {
        match answer.header.cluster_id {
            0 => Err(self.gateway.meaningless()),
            _ => Ok(answer),
        }
    }
}
