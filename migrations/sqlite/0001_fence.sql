-- The tables of the fence in SQLite. The statements of the library implement the rules that SQL
-- functions implement in Postgres. The migration replaces `tower_fence.` in this text with the
-- prefix of the fence's table names.

-- The highest stale token of each resource.
CREATE TABLE tower_fence.resources (
    resource TEXT PRIMARY KEY NOT NULL CHECK (length(CAST(resource AS BLOB)) BETWEEN 1 AND 255),
    max_token INTEGER NOT NULL CHECK (max_token BETWEEN 0 AND 999999999999999),
    updated_at TEXT NOT NULL DEFAULT CURRENT_TIMESTAMP,
    -- The highest token that was announced as granted, and SHA-256 of the lease id of that grant,
    -- or null if a higher token was used or raised since.
    announced INTEGER NOT NULL DEFAULT 0 CHECK (announced BETWEEN 0 AND 999999999999999),
    announced_lease BLOB,
    partition INTEGER NOT NULL CHECK (partition BETWEEN 0 AND 255)
) WITHOUT ROWID;

-- For each of the 256 partitions, the highest stale token of the resources that have no row.
CREATE TABLE tower_fence.floors (
    partition INTEGER PRIMARY KEY NOT NULL CHECK (partition BETWEEN 0 AND 255),
    floor INTEGER NOT NULL DEFAULT 0 CHECK (floor BETWEEN 0 AND 999999999999999)
);
WITH RECURSIVE partitions (partition) AS (
    SELECT 0 UNION ALL SELECT partition + 1 FROM partitions WHERE partition < 255
)
INSERT INTO tower_fence.floors (partition) SELECT partition FROM partitions;

-- The last epoch that was begun in each partition.
CREATE TABLE tower_fence.epochs (
    partition INTEGER PRIMARY KEY NOT NULL CHECK (partition BETWEEN 0 AND 255),
    epoch INTEGER NOT NULL CHECK (epoch BETWEEN 0 AND 999999)
);

-- The identity of this source of epochs, in one row. A lease store refuses the epochs of another
-- source.
CREATE TABLE tower_fence.epoch_source (
    id TEXT PRIMARY KEY NOT NULL
) WITHOUT ROWID;
INSERT INTO tower_fence.epoch_source (id) VALUES (lower(hex(randomblob(16))));

-- The response of each write under an idempotency key, stored in the transaction of that write.
CREATE TABLE tower_fence.idempotency_keys (
    -- `scope` is the SHA-256 of the scope of the key, and `fingerprint` is that of the request.
    scope BLOB NOT NULL CHECK (length(scope) = 32),
    key TEXT NOT NULL,
    fingerprint BLOB NOT NULL CHECK (length(fingerprint) = 32),
    -- Null until the response is stored.
    status INTEGER CHECK (status BETWEEN 100 AND 999),
    headers BLOB,
    body BLOB,
    -- Milliseconds since 1970.
    expires_at INTEGER NOT NULL,
    PRIMARY KEY (scope, key)
);
CREATE INDEX tower_fence.idempotency_keys_expires_at ON tower_fence_idempotency_keys (expires_at);
CREATE INDEX tower_fence.resources_partition ON tower_fence_resources (partition);
