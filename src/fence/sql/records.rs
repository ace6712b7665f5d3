//! Records of idempotency keys.

use std::time::Duration;

use bytes::Bytes;
use sqlx::Database;

use super::{Admission, Admit, On};

#[trait_variant::make(Send)]
pub(crate) trait Records: Database {
    /// Reserves an idempotency key, which the SQL functions call a claim, and admits a token, or
    /// finds the record of the key. If a transaction of another request has reserved the key, waits
    /// for the end of that transaction. `early` is as in [`Admissions::admit`](super::Admissions).
    async fn admit_once(
        on: On<'_, Self>,
        request: &KeyedRequest,
        admit: Admit<'_>,
        early: bool,
    ) -> sqlx::Result<Reservation>;

    /// Reads a record, unless it has expired.
    async fn find_record(on: On<'_, Self>, id: &RecordId) -> sqlx::Result<Option<Record>>;

    /// Adds the response to the record of the key that this transaction has reserved. Returns false
    /// if the record does not exist.
    async fn store_response(
        on: On<'_, Self>,
        id: &RecordId,
        response: &StoredResponse,
    ) -> sqlx::Result<bool>;

    /// Removes at most `at_most` expired records, and returns the number of removed records.
    async fn remove_expired(on: On<'_, Self>, at_most: u32) -> sqlx::Result<u64>;
}

pub(crate) struct KeyedRequest {
    pub(crate) id: RecordId,
    /// The SHA-256 digest of the request.
    pub(crate) fingerprint: [u8; 32],
    /// The time for which the record is valid.
    pub(crate) ttl: Duration,
    /// The timeout of the wait for another request with the same key, or `None` for the lock
    /// timeout.
    pub(crate) wait: Option<Duration>,
}

/// Identity of a record: the key and its scope.
#[derive(Clone, Debug)]
pub(crate) struct RecordId {
    /// The SHA-256 digest of the names of the scope and of the principal. A digest keeps the index
    /// entry small, however many names there are.
    pub scope: [u8; 32],
    pub key: String,
}

/// Stored form of a response. No other type of the fence represents HTTP.
#[derive(Clone, Debug)]
pub(crate) struct StoredResponse {
    pub status: u16,
    pub headers: Vec<u8>,
    pub body: Bytes,
}

/// Key that a transaction has reserved, and whose record has no response yet.
pub(crate) struct ReservedKey {
    pub(in crate::fence) id: RecordId,
    /// The role at the beginning of the transaction. A hook of the application may switch to a role
    /// without privileges on the fence.
    pub(in crate::fence) role: String,
}

pub(crate) struct Record {
    pub fingerprint: Vec<u8>,
    /// `None` if the transaction that reserved the key was committed by an SQL statement.
    pub response: Option<StoredResponse>,
}

/// Columns of a record.
pub(super) type Row = (Vec<u8>, Option<i16>, Option<Vec<u8>>, Option<Vec<u8>>);

impl Record {
    pub(super) fn of((fingerprint, status, headers, body): Row) -> Self {
        Self {
            fingerprint,
            response: status.map(|status| StoredResponse {
                status: status.unsigned_abs(),
                headers: headers.unwrap_or_default(),
                body: body.unwrap_or_default().into(),
            }),
        }
    }
}

pub(crate) enum Reservation {
    /// The key was reserved. `role` is the role at the beginning of the transaction.
    Reserved { role: String, admission: Admission },
    /// The existing record, or `None` if the record has just been removed.
    Found(Option<Record>),
    /// The early transaction cannot be used, for example because it began before the last write to
    /// the resource.
    TooEarly,
}
