//! The gateway, as far as the store calls it: the server is asked without a socket, and tells what JSON it would.

use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use shuttle::rand::{Rng, thread_rng};

use super::{EtcdServer, State, list, number, watches::Told};
use crate::lease::LeaseError;

pub struct Gateway(pub EtcdServer);

impl Gateway {
    pub async fn call<T: DeserializeOwned>(
        &self,
        path: &str,
        body: &Value,
    ) -> Result<T, EtcdError> {
        let (path, body) = (path.to_owned(), body.clone());
        let call = move |state: &mut State| match path.as_str() {
            "/v3/kv/txn" => state.transact(&body),
            "/v3/lease/grant" => state.make_lease(number(&body["ID"]), number(&body["TTL"])),
            "/v3/lease/revoke" => state.revoke(number(&body["ID"])),
            "/v3/lease/timetolive" => Ok(state.left(number(&body["ID"]))),
            "/v3/maintenance/status" => {
                let applied = (state.revision + 3).to_string();
                Ok(json!({ "header": state.header(), "raftAppliedIndex": applied }))
            }
            other => panic!("{other}"),
        };
        Ok(serde_json::from_value(self.0.run(call).await?).unwrap())
    }

    pub async fn call_stream<T: DeserializeOwned>(
        &self,
        path: &str,
        requests: &[Value],
    ) -> Result<Vec<T>, EtcdError> {
        assert_eq!(path, "/v3/lease/keepalive");
        let ids: Vec<i64> = requests
            .iter()
            .map(|request| number(&request["ID"]))
            .collect();
        let keep = move |state: &mut State| -> Vec<Value> {
            ids.iter().map(|id| state.keep_alive(*id)).collect()
        };
        let kept = self.0.run(keep).await.into_iter();
        let kept = kept.map(|kept| serde_json::from_value(json!({ "result": kept })).unwrap());
        Ok(kept.collect())
    }

    /// Opens a stream of watches, which fails at times.
    pub async fn open(&self, path: &str, requests: &[Value]) -> Result<Stream, EtcdError> {
        assert_eq!(path, "/v3/watch");
        let requests = requests.to_vec();
        let open = move |state: &mut State| match thread_rng().gen_ratio(1, 8) {
            true => Err(EtcdError::UNAVAILABLE),
            false => Ok(state.watches.open(&requests)),
        };
        let (id, told) = self.0.run(open).await?;
        Ok(Stream {
            server: self.0.clone(),
            id,
            told,
        })
    }

    pub fn meaningless(&self) -> EtcdError {
        unreachable!("each answer has a cluster")
    }
}

pub struct Stream {
    server: EtcdServer,
    id: u64,
    told: Told,
}

impl Stream {
    pub async fn next<T: DeserializeOwned>(&mut self) -> Option<T> {
        let event = self.told.next().await?;
        // What was on its way is lost with the stream.
        let is_open = self.server.0.lock().unwrap().watches.is_open(self.id);
        let event = is_open.then_some(event)?;
        let message = json!({ "result": { "events": [event] } });
        Some(serde_json::from_value(message).unwrap())
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        super::step();
        self.server.0.lock().unwrap().watches.close(self.id);
    }
}

#[derive(Debug, thiserror::Error)]
#[error("etcd answered: {message}")]
pub struct EtcdError {
    code: i64,
    message: &'static str,
}

impl EtcdError {
    pub const NOT_FOUND: Self = Self {
        code: 5,
        message: "requested lease not found",
    };
    pub const LEASE_THERE: Self = Self {
        code: 9,
        message: "lease already exists",
    };
    pub const UNAVAILABLE: Self = Self {
        code: 14,
        message: "no leader",
    };

    pub fn is_not_found(&self) -> bool {
        self.code == Self::NOT_FOUND.code
    }

    pub fn is_refusal(&self) -> bool {
        self.code != Self::UNAVAILABLE.code
    }

    pub fn is_lease_there(&self) -> bool {
        self.code == Self::LEASE_THERE.code
    }
}

impl From<EtcdError> for LeaseError {
    fn from(error: EtcdError) -> Self {
        Self::unavailable(error)
    }
}
