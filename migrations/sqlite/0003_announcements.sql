-- The highest token that was announced as granted, and SHA-256 of the id of its lease: what tells a
-- repeated announcement from the next one.
ALTER TABLE fence_resources ADD COLUMN announced INTEGER NOT NULL DEFAULT 0;
ALTER TABLE fence_resources ADD COLUMN announced_lease BLOB;

-- Which source of epochs this is. Lease stores refuse clocks that belong to another one.
CREATE TABLE fence_epoch_source (
    id TEXT PRIMARY KEY NOT NULL
) WITHOUT ROWID;
INSERT INTO fence_epoch_source (id) VALUES (lower(hex(randomblob(16))));
