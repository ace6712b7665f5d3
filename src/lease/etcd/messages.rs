//! What etcd's gateway says and is told: JSON with keys and values in base64, and integers of 64 bits as texts.

use base64::{Engine, prelude::BASE64_STANDARD};
use serde::{Deserialize, Deserializer, de::Error};
use serde_json::{Value, json};

/// What stands before each answer: which cluster has answered, by which of its members, and how far it has counted.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Header {
    #[serde(deserialize_with = "number")]
    pub(super) cluster_id: u64,
    #[serde(deserialize_with = "number")]
    pub(super) member_id: u64,
    #[serde(deserialize_with = "number")]
    pub(super) revision: i64,
}

/// A key and its value.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct KeyValue {
    pub(super) key: Bytes,
    pub(super) value: Bytes,
    #[serde(deserialize_with = "number")]
    pub(super) create_revision: i64,
    #[serde(deserialize_with = "number")]
    pub(super) mod_revision: i64,
    /// The etcd lease that the key ends with; 0 where there is none.
    #[serde(deserialize_with = "number")]
    pub(super) lease: i64,
}

/// The answer to a transaction.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct TxnAnswer {
    pub(super) header: Header,
    pub(super) succeeded: bool,
    responses: Vec<OpAnswer>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct OpAnswer {
    response_range: Option<RangeAnswer>,
}

/// The keys of a range.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct RangeAnswer {
    pub(super) header: Header,
    pub(super) kvs: Vec<KeyValue>,
    pub(super) more: bool,
    #[serde(deserialize_with = "number")]
    pub(super) count: i64,
}

/// What became of an etcd lease.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct LeaseAnswer {
    /// In seconds; 0 or below where there is no such lease.
    #[serde(rename = "TTL", deserialize_with = "number")]
    pub(super) ttl: i64,
}

/// One message of a stream.
#[derive(Debug, Deserialize)]
pub(super) struct Streamed<T> {
    pub(super) result: T,
}

/// What a watch tells.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct WatchAnswer {
    pub(super) canceled: bool,
    pub(super) events: Vec<Event>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Event {
    /// `DELETE`, or nothing for a PUT.
    #[serde(rename = "type")]
    pub(super) kind: String,
    pub(super) kv: KeyValue,
}

/// How a member stands.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct StatusAnswer {
    pub(super) header: Header,
    #[serde(rename = "raftAppliedIndex", deserialize_with = "number")]
    pub(super) applied: i64,
}

#[derive(Deserialize)]
pub(super) struct AuthAnswer {
    pub(super) token: String,
}

/// What went wrong, as the gateway says it.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Refusal {
    pub(super) code: i64,
    pub(super) message: String,
}

impl TxnAnswer {
    /// The answers to the reads of the transaction, without those to its writes.
    pub(super) fn reads(self) -> Vec<RangeAnswer> {
        let answers = self.responses.into_iter();
        answers.filter_map(|answer| answer.response_range).collect()
    }
}

/// Bytes, in base64.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Bytes(pub(super) Vec<u8>);

impl<'de> Deserialize<'de> for Bytes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let bytes = BASE64_STANDARD.decode(text);
        bytes.map(Self).map_err(D::Error::custom)
    }
}

/// An integer, as a text or as it is.
fn number<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: std::str::FromStr,
{
    let digits = match Value::deserialize(deserializer)? {
        Value::String(digits) => digits,
        other => other.to_string(),
    };
    digits.parse().map_err(|_| D::Error::custom("no integer"))
}

pub(super) fn base64(bytes: impl AsRef<[u8]>) -> String {
    BASE64_STANDARD.encode(bytes)
}

/// A range of keys, from the first one up to the second one.
pub(super) type Range<'a> = (&'a str, &'a str);

/// That a key was written last in this revision; 0 where there is no such key.
pub(super) fn written_at(key: &str, revision: i64) -> Value {
    json!({ "key": base64(key), "target": "MOD", "result": "EQUAL", "mod_revision": revision.to_string() })
}

/// That a key was made in this revision; 0 where there is no such key.
pub(super) fn made_at(key: &str, revision: i64) -> Value {
    json!({ "key": base64(key), "target": "CREATE", "result": "EQUAL", "create_revision": revision.to_string() })
}

/// That a key has this value.
pub(super) fn has_value(key: &str, value: &[u8]) -> Value {
    json!({ "key": base64(key), "target": "VALUE", "result": "EQUAL", "value": base64(value) })
}

/// That there is no key in a range.
pub(super) fn is_empty((first, end): Range<'_>) -> Value {
    json!({
        "key": base64(first), "range_end": base64(end),
        "target": "CREATE", "result": "EQUAL", "create_revision": "0",
    })
}

/// That each key of a range was made in this revision or later.
pub(super) fn made_since((first, end): Range<'_>, revision: i64) -> Value {
    let before = revision.saturating_sub(1).to_string();
    json!({
        "key": base64(first), "range_end": base64(end),
        "target": "CREATE", "result": "GREATER", "create_revision": before,
    })
}

/// Writes a key, which ends with an etcd lease; 0: with none.
pub(super) fn put(key: &str, value: &[u8], lease: i64) -> Value {
    json!({ "request_put": { "key": base64(key), "value": base64(value), "lease": lease.to_string() } })
}

pub(super) fn delete(key: &str) -> Value {
    json!({ "request_delete_range": { "key": base64(key) } })
}

pub(super) fn get(key: &str) -> Value {
    json!({ "request_range": { "key": base64(key) } })
}

/// Counts the keys of a range.
pub(super) fn count((first, end): Range<'_>) -> Value {
    json!({ "request_range": { "key": base64(first), "range_end": base64(end), "count_only": true } })
}

/// Reads the keys of a range.
pub(super) fn get_range((first, end): Range<'_>) -> Value {
    json!({ "request_range": { "key": base64(first), "range_end": base64(end) } })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integers_are_texts_or_numbers_and_may_be_left_out() {
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
