//! etcd, as far as the line of waiters uses it: keys that end with leases, transactions, and watches.
//!
//! A call may have its effect twice, and goes on when its caller has gone away. What is watched may be on its way for as long as
//! the scheduler likes, each watch of a stream by itself, and a stream may be cut. A lease ends when its time is over, as the next call
//! finds.

pub mod gateway;
mod watches;

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
    time::Duration,
};

use base64::{Engine, prelude::BASE64_STANDARD};
use serde_json::{Value, json};
use shuttle::rand::{Rng, thread_rng};

use self::{gateway::EtcdError, watches::Watches};
use super::{
    clock::{Instant, sleep},
    runtime::Handle,
    step,
};

/// What lasts longer than this survives a process that stands still.
const LONGEST_STANDSTILL: Duration = Duration::from_secs(60);

type Bytes = Vec<u8>;

#[derive(Clone)]
struct Entry {
    value: String,
    created: i64,
    modified: i64,
    lease: i64,
}

struct EtcdLease {
    ttl: Duration,
    end: Duration,
}

pub struct State {
    revision: i64,
    entries: BTreeMap<Bytes, Entry>,
    leases: BTreeMap<i64, EtcdLease>,
    watches: Watches,
}

/// The server. Clones are the same one.
#[derive(Clone)]
pub struct EtcdServer(Arc<Mutex<State>>);

impl Default for EtcdServer {
    fn default() -> Self {
        Self(Arc::new(Mutex::new(State {
            revision: 1,
            entries: BTreeMap::new(),
            leases: BTreeMap::new(),
            watches: Watches::default(),
        })))
    }
}

impl EtcdServer {
    /// Runs a call to its end, also where its caller goes away; at times twice.
    async fn run<T: Send + 'static>(
        &self,
        mut call: impl FnMut(&mut State) -> T + Send + 'static,
    ) -> T {
        let server = self.clone();
        let run = Handle::first().spawn(async move {
            let mut once = async || {
                pause().await;
                let mut state = server.0.lock().unwrap();
                state.end_what_is_over();
                call(&mut state)
            };
            let answer = once().await;
            let answer = match thread_rng().gen_ratio(1, 8) {
                true => once().await,
                false => answer,
            };
            pause().await;
            answer
        });
        run.await.unwrap()
    }

    /// Ends the streams of watches, each by chance; and the places in line, as where their process stood still.
    pub fn cut(&self) {
        step();
        let mut state = self.0.lock().unwrap();
        state.watches.cut();
        for lease in state.leases.values_mut() {
            if lease.ttl < LONGEST_STANDSTILL && thread_rng().gen_bool(0.5) {
                lease.end = Duration::ZERO;
            }
        }
        state.end_what_is_over();
    }
}

impl State {
    /// What stands before each answer.
    fn header(&self) -> Value {
        json!({ "cluster_id": "7", "member_id": "1", "revision": self.revision.to_string() })
    }

    fn transact(&mut self, body: &Value) -> Result<Value, EtcdError> {
        let compare = list(&body["compare"]);
        let succeeded = compare.iter().all(|compare| self.holds(compare));
        let operations = list(&body[if succeeded { "success" } else { "failure" }]);
        let revision = self.revision + 1;
        for put in operations.iter().map(|operation| &operation["request_put"]) {
            let lease = number(&put["lease"]);
            if lease != 0 && !self.leases.contains_key(&lease) {
                return Err(EtcdError::NOT_FOUND);
            }
        }
        let mut responses = vec![];
        for operation in operations {
            let (kind, request) = operation.as_object().unwrap().iter().next().unwrap();
            match kind.as_str() {
                "request_put" => self.put(request, revision),
                "request_delete_range" => self.delete(&bytes(&request["key"]), revision),
                "request_range" => responses.push(json!({ "response_range": self.range(request) })),
                other => panic!("{other}"),
            }
        }
        Ok(json!({ "header": self.header(), "succeeded": succeeded, "responses": responses }))
    }

    /// Whether a comparison holds, for each key of a range. A key that is not there was made and written at 0; a range without
    /// keys is as one of those, for `EQUAL`.
    fn holds(&self, compare: &Value) -> bool {
        let found: Vec<Entry> = self
            .found(compare)
            .map(|(_, entry)| entry.clone())
            .collect();
        let is_range = !compare["range_end"].is_null();
        let (target, result) = (text(&compare["target"]), text(&compare["result"]));
        if target == "VALUE" {
            let value = text(&compare["value"]);
            return found.first().is_some_and(|entry| entry.value == value);
        }
        let at = |entry: &Entry| match target {
            "MOD" => entry.modified,
            "CREATE" => entry.created,
            other => panic!("{other}"),
        };
        let wanted = match target {
            "MOD" => number(&compare["mod_revision"]),
            _ => number(&compare["create_revision"]),
        };
        let holds = |at: i64| match result {
            "EQUAL" => at == wanted,
            "GREATER" => at > wanted,
            other => panic!("{other}"),
        };
        match found.is_empty() && !(is_range && result == "GREATER") {
            true => holds(0),
            false => found.iter().all(|entry| holds(at(entry))),
        }
    }

    fn range(&self, request: &Value) -> Value {
        let counts = request["count_only"] == true;
        let kvs: Vec<_> = self
            .found(request)
            .map(|(key, entry)| kv(key, entry))
            .collect();
        let count = kvs.len().to_string();
        let kvs = if counts { vec![] } else { kvs };
        json!({ "header": self.header(), "kvs": kvs, "count": count })
    }

    fn found(&self, request: &Value) -> impl Iterator<Item = (&Bytes, &Entry)> {
        let first = bytes(&request["key"]);
        let end = match &request["range_end"] {
            Value::Null => [first.as_slice(), b"\0"].concat(),
            end => bytes(end),
        };
        self.entries.range(first..end)
    }

    fn put(&mut self, request: &Value, revision: i64) {
        self.revision = revision;
        let key = bytes(&request["key"]);
        let created = self
            .entries
            .get(&key)
            .map_or(revision, |before| before.created);
        let entry = Entry {
            value: text(&request["value"]).to_owned(),
            created,
            modified: revision,
            lease: number(&request["lease"]),
        };
        self.watches
            .tell(&key, revision, json!({ "kv": kv(&key, &entry) }));
        self.entries.insert(key, entry);
    }

    fn delete(&mut self, key: &Bytes, revision: i64) {
        if self.entries.remove(key).is_some() {
            self.revision = revision;
            let kv =
                json!({ "key": BASE64_STANDARD.encode(key), "mod_revision": revision.to_string() });
            self.watches
                .tell(key, revision, json!({ "type": "DELETE", "kv": kv }));
        }
    }

    fn make_lease(&mut self, id: i64, ttl: i64) -> Result<Value, EtcdError> {
        if self.leases.contains_key(&id) {
            return Err(EtcdError::LEASE_THERE);
        }
        let ttl = Duration::from_secs(ttl.unsigned_abs());
        let end = Instant::since_beginning() + ttl;
        self.leases.insert(id, EtcdLease { ttl, end });
        Ok(self.left(id))
    }

    /// Ends a lease, and its keys with it.
    fn revoke(&mut self, id: i64) -> Result<Value, EtcdError> {
        self.leases.remove(&id).ok_or(EtcdError::NOT_FOUND)?;
        let of_it = self.entries.iter().filter(|(_, entry)| entry.lease == id);
        let keys: Vec<Bytes> = of_it.map(|(key, _)| key.clone()).collect();
        let revision = self.revision + 1;
        keys.iter().for_each(|key| self.delete(key, revision));
        Ok(json!({ "header": self.header() }))
    }

    fn keep_alive(&mut self, id: i64) -> Value {
        if let Some(lease) = self.leases.get_mut(&id) {
            lease.end = Instant::since_beginning() + lease.ttl;
        }
        self.left(id)
    }

    fn left(&self, id: i64) -> Value {
        let left = |lease: &EtcdLease| {
            lease
                .end
                .saturating_sub(Instant::since_beginning())
                .as_secs()
        };
        let left = self.leases.get(&id).map_or(0, left);
        json!({ "ID": id.to_string(), "TTL": left.to_string() })
    }

    fn end_what_is_over(&mut self) {
        let now = Instant::since_beginning();
        let over = self.leases.iter().filter(|(_, lease)| lease.end <= now);
        let over: Vec<i64> = over.map(|(id, _)| *id).collect();
        over.iter().for_each(|id| drop(self.revoke(*id)));
    }
}

fn kv(key: &Bytes, entry: &Entry) -> Value {
    json!({
        "key": BASE64_STANDARD.encode(key),
        "value": entry.value,
        "create_revision": entry.created.to_string(),
        "mod_revision": entry.modified.to_string(),
        "lease": entry.lease.to_string(),
    })
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap()
}

fn bytes(value: &Value) -> Bytes {
    BASE64_STANDARD.decode(text(value)).unwrap()
}

/// An integer, which is a text; 0 where there is none.
fn number(value: &Value) -> i64 {
    value.as_str().map_or(0, |digits| digits.parse().unwrap())
}

async fn pause() {
    step();
    let ms = thread_rng().gen_range(0..2);
    sleep(Duration::from_millis(ms)).await;
}
