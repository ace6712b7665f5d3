-- One row per idempotency key: the response of the write that was made under it. It is written in the
-- transaction of that write; the response is null only inside of it.
CREATE TABLE fence_idempotency_keys (
    -- SHA-256 of the names that the key belongs to.
    scope bytea NOT NULL,
    key text NOT NULL,
    -- SHA-256 of the request.
    fingerprint bytea NOT NULL,
    status smallint,
    headers bytea,
    body bytea,
    expires_at timestamptz NOT NULL,
    PRIMARY KEY (scope, key)
);

CREATE INDEX fence_idempotency_keys_expires_at ON fence_idempotency_keys (expires_at);
