-- The table that the programs in this folder write.
CREATE TABLE inventory (sku text PRIMARY KEY, stock bigint NOT NULL);
INSERT INTO inventory VALUES ('sku-1', 10), ('sku-2', 5);
