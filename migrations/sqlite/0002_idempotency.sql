-- One row per idempotency key: the response of the write that was made under it. It is written in the
-- transaction of that write; the response is null only inside of it.
CREATE TABLE fence_idempotency_keys (
    -- SHA-256 of the names that the key belongs to.
    scope BLOB NOT NULL,
    key TEXT NOT NULL,
    -- SHA-256 of the request.
    fingerprint BLOB NOT NULL,
    status INTEGER,
    headers BLOB,
    body BLOB,
    -- Milliseconds since 1970.
    expires_at INTEGER NOT NULL,
    PRIMARY KEY (scope, key)
);

CREATE INDEX fence_idempotency_keys_expires_at ON fence_idempotency_keys (expires_at);
