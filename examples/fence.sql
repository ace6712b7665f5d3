-- The story of the paused holder, in SQL alone.
--
--     psql postgres://localhost/shop -f examples/fence.sql
--
-- The tables and functions of the fence have to be there: `Fence::migrate` makes them, or the script that
-- `Fence::schema_sql` returns. This leaves nothing behind but the row of sku-1 in fence_resources.

\set QUIET on
\pset format unaligned
\pset tuples_only on

CREATE TEMPORARY TABLE inventory (sku text PRIMARY KEY, stock bigint NOT NULL);
INSERT INTO inventory VALUES ('sku-1', 100);

-- Tokens come from a lock service, which counts up. Here they are the next two.
SELECT coalesce(fence_max_token('sku-1'), 0) + 1 AS first, coalesce(fence_max_token('sku-1'), 0) + 2 AS second
\gset

\echo holder 1 gets the lease with token :first, reads the stock of 100, and is paused
\echo holder 2 gets the lease with token :second, and takes four

BEGIN;
SET LOCAL lock_timeout = '5s';
-- First the admission, in a statement of its own. The row is locked until COMMIT.
SELECT 'max_token is ' || fence_admit('sku-1', :second);
UPDATE inventory SET stock = stock - 4 WHERE sku = 'sku-1';
COMMIT;

\echo holder 1 wakes up, believes that it holds the lease, and takes one from the 100 it has read

BEGIN;
SET LOCAL lock_timeout = '5s';
SELECT 'max_token is ' || fence_admit('sku-1', :first);
\if :ERROR
    \echo the paused holder is refused: :SQLSTATE
    ROLLBACK;
\else
    UPDATE inventory SET stock = 99 WHERE sku = 'sku-1';
    COMMIT;
\endif

SELECT 'the stock is ' || stock FROM inventory WHERE sku = 'sku-1';
