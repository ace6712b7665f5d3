-- One row per resource that was ever written: the highest token that is dead.
CREATE TABLE fence_resources (
    resource TEXT PRIMARY KEY NOT NULL,
    max_token INTEGER NOT NULL,
    updated_at TEXT NOT NULL DEFAULT CURRENT_TIMESTAMP
) WITHOUT ROWID;

-- One row per partition of the lease store: the last epoch that was handed out.
CREATE TABLE fence_epochs (
    partition INTEGER PRIMARY KEY NOT NULL,
    epoch INTEGER NOT NULL
);
