-- The highest token that was announced as granted, and SHA-256 of the id of its lease: what tells a
-- repeated announcement from the next one.
ALTER TABLE fence_resources
    ADD COLUMN announced bigint NOT NULL DEFAULT 0,
    ADD COLUMN announced_lease bytea,
    -- Names are compared by their bytes: another version of the C library cannot order them anew,
    -- and so hide a row behind an index that is corrupt from then on.
    ALTER COLUMN resource TYPE text COLLATE "C";

ALTER TABLE fence_idempotency_keys
    ALTER COLUMN key TYPE text COLLATE "C";

-- Which source of epochs this is. Lease stores refuse clocks that belong to another one.
CREATE TABLE fence_epoch_source (
    id text PRIMARY KEY
);
INSERT INTO fence_epoch_source (id) VALUES (replace(gen_random_uuid()::text, '-', ''));
