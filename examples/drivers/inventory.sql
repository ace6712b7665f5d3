-- What the programs of this folder write to.
CREATE TABLE inventory (sku text PRIMARY KEY, stock bigint NOT NULL);
INSERT INTO inventory VALUES ('sku-1', 10), ('sku-2', 5);
