-- One row per resource that was ever written: the highest token that is dead.
-- Every write updates its row in place; the free space keeps those updates on the page (HOT).
CREATE TABLE fence_resources (
    resource text PRIMARY KEY,
    max_token bigint NOT NULL,
    updated_at timestamptz NOT NULL DEFAULT now()
) WITH (fillfactor = 70);

-- One row per partition of the lease store: the last epoch that was handed out.
CREATE TABLE fence_epochs (
    partition smallint PRIMARY KEY,
    epoch bigint NOT NULL
);
