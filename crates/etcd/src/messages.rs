//! Messages of etcd's gateway: JSON with keys and values in base64, and 64-bit integers as strings.

use base64::{Engine, prelude::BASE64_STANDARD};
use serde::{Deserialize, Deserializer, de::Error};
use serde_json::{Value, json};

/// Range of keys, from the first key (included) to the second key (excluded).
pub(crate) type Range = (String, String);

/// Header of each response: the cluster, the member that responded, and the revision.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Header {
    #[serde(deserialize_with = "number")]
    pub(crate) cluster_id: u64,
    #[serde(deserialize_with = "number")]
    pub(crate) member_id: u64,
    #[serde(deserialize_with = "number")]
    pub(crate) revision: i64,
}

/// Key with its value.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct KeyValue {
    pub(crate) key: Bytes,
    pub(crate) value: Bytes,
    #[serde(deserialize_with = "number")]
    pub(crate) create_revision: i64,
    #[serde(deserialize_with = "number")]
    pub(crate) mod_revision: i64,
    /// The etcd lease of the key, or 0 if the key has none.
    #[serde(deserialize_with = "number")]
    pub(crate) lease: i64,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct TxnAnswer {
    pub(crate) header: Header,
    pub(crate) succeeded: bool,
    responses: Vec<OpAnswer>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct OpAnswer {
    response_range: Option<RangeAnswer>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct RangeAnswer {
    pub(crate) kvs: Vec<KeyValue>,
    pub(crate) more: bool,
    #[serde(deserialize_with = "number")]
    pub(crate) count: u64,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct LeaseAnswer {
    /// The time in seconds. It is 0 or less if the etcd lease does not exist.
    #[serde(rename = "TTL", deserialize_with = "number")]
    pub(crate) ttl: i64,
}

/// One message of a stream.
#[derive(Debug, Deserialize)]
pub(crate) struct Streamed<T> {
    pub(crate) result: T,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct WatchAnswer {
    pub(crate) canceled: bool,
    pub(crate) events: Vec<Event>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Event {
    /// `DELETE`, or an empty text for a PUT.
    #[serde(rename = "type")]
    pub(crate) kind: String,
    pub(crate) kv: KeyValue,
}

/// Status of a member.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct StatusAnswer {
    pub(crate) header: Header,
    #[serde(rename = "raftAppliedIndex", deserialize_with = "number")]
    pub(crate) applied: i64,
}

#[derive(Deserialize)]
pub(crate) struct AuthAnswer {
    pub(crate) token: String,
}

impl TxnAnswer {
    /// Returns the responses to the reads of the transaction.
    pub(crate) fn reads(self) -> impl Iterator<Item = RangeAnswer> {
        let answers = self.responses.into_iter();
        answers.filter_map(|answer| answer.response_range)
    }
}

/// Bytes that are transmitted in base64.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Bytes(pub(crate) Vec<u8>);

impl<'de> Deserialize<'de> for Bytes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let bytes = BASE64_STANDARD.decode(text);
        bytes.map(Self).map_err(D::Error::custom)
    }
}

/// Reads an integer from a string or a number.
fn number<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: std::str::FromStr,
{
    let digits = match Value::deserialize(deserializer)? {
        Value::String(digits) => digits,
        other => other.to_string(),
    };
    digits
        .parse()
        .map_err(|_| D::Error::custom("invalid integer"))
}

pub(crate) fn base64(bytes: impl AsRef<[u8]>) -> String {
    BASE64_STANDARD.encode(bytes)
}

/// Returns a comparison that holds if a key was last written in this revision. With revision 0, it
/// holds if the key does not exist.
pub(crate) fn written_at(key: &str, revision: i64) -> Value {
    json!({ "key": base64(key), "target": "MOD", "result": "EQUAL", "mod_revision": revision.to_string() })
}

/// Returns a comparison that holds if a key was created in this revision. With revision 0, it holds
/// if the key does not exist.
pub(crate) fn created_at(key: &str, revision: i64) -> Value {
    json!({ "key": base64(key), "target": "CREATE", "result": "EQUAL", "create_revision": revision.to_string() })
}

/// Returns a comparison that holds if a key has this value.
pub(crate) fn has_value(key: &str, value: &[u8]) -> Value {
    json!({ "key": base64(key), "target": "VALUE", "result": "EQUAL", "value": base64(value) })
}

/// Returns a comparison that holds if a range contains no key.
pub(crate) fn is_empty((first, end): &Range) -> Value {
    json!({
        "key": base64(first), "range_end": base64(end),
        "target": "CREATE", "result": "EQUAL", "create_revision": "0",
    })
}

/// Returns a comparison that holds if every key of a range was created in this revision or later.
pub(crate) fn created_since((first, end): &Range, revision: i64) -> Value {
    let before = revision.saturating_sub(1).to_string();
    json!({
        "key": base64(first), "range_end": base64(end),
        "target": "CREATE", "result": "GREATER", "create_revision": before,
    })
}

/// Returns the operation that writes a key with an etcd lease, or without one (0).
pub(crate) fn put(key: &str, value: &[u8], lease: i64) -> Value {
    json!({ "request_put": { "key": base64(key), "value": base64(value), "lease": lease.to_string() } })
}

pub(crate) fn delete(key: &str) -> Value {
    json!({ "request_delete_range": { "key": base64(key) } })
}

pub(crate) fn get(key: &str) -> Value {
    json!({ "request_range": { "key": base64(key) } })
}

pub(crate) fn get_range((first, end): &Range) -> Value {
    json!({ "request_range": { "key": base64(first), "range_end": base64(end) } })
}

/// Returns the operation that counts the keys of a range and reads the name of the key that was
/// created first.
pub(crate) fn get_first((first, end): &Range) -> Value {
    json!({ "request_range": {
        "key": base64(first), "range_end": base64(end), "keys_only": true,
        "limit": "1", "sort_order": "ASCEND", "sort_target": "CREATE",
    } })
}

pub(crate) fn count((first, end): &Range) -> Value {
    json!({ "request_range": { "key": base64(first), "range_end": base64(end), "count_only": true } })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integers_may_be_strings_numbers_or_missing() {
        let header: Header =
            serde_json::from_str(r#"{"cluster_id":"14089571842301612623","revision":7}"#).unwrap();
        assert_eq!(
            (header.cluster_id, header.member_id, header.revision),
            (14_089_571_842_301_612_623, 0, 7)
        );
        for wrong in [
            r#"{"revision":"x"}"#,
            r#"{"revision":1.5}"#,
            r#"{"revision":[]}"#,
        ] {
            serde_json::from_str::<Header>(wrong).unwrap_err();
        }
        let kv: KeyValue = serde_json::from_str(r#"{"key":"YQ==","lease":"-1"}"#).unwrap();
        assert_eq!((kv.key.0.as_slice(), kv.lease), (b"a".as_slice(), -1));
        serde_json::from_str::<KeyValue>(r#"{"key":"*"}"#).unwrap_err();
    }
}
