-- Rows do not live for ever. Where rows were removed, their partition keeps a floor: the highest token that
-- was dead or granted on any of them. A resource without a row is admissible only above it.
CREATE TABLE fence_floors (
    partition INTEGER PRIMARY KEY NOT NULL,
    floor INTEGER NOT NULL DEFAULT 0
);
WITH RECURSIVE partitions (partition) AS (
    SELECT 0 UNION ALL SELECT partition + 1 FROM partitions WHERE partition < 255
)
INSERT INTO fence_floors (partition) SELECT partition FROM partitions;

-- Null in rows that are older than this.
ALTER TABLE fence_resources ADD COLUMN partition INTEGER;
CREATE INDEX fence_resources_partition ON fence_resources (partition);
