-- A paused holder and its successor, with psql.
--
--     DATABASE_URL=postgres://localhost/shop cargo run --example inventory
--     psql postgres://localhost/shop -f examples/fence.sql      # in another terminal
--
-- The inventory service is the issuer, and creates the fence's tables and functions. To use another
-- issuer, pass `-v issuer=http://…/locks`. The script acquires leases with curl.

\set QUIET on
\set ON_ERROR_STOP on
\set ON_ERROR_ROLLBACK off
\set SHOW_CONTEXT never
\pset format unaligned
\pset tuples_only on
\if :{?issuer}
\else
    \set issuer http://127.0.0.1:3000/locks
\endif

-- If another holder has the lease, the request waits in the queue for up to five seconds.
\set lease `curl -sS --fail --max-time 10 --json '{"ttl_ms": 500, "wait_ms": 5000}' :'issuer'/sku-1`
SELECT :'lease'::json ->> 'token' AS first
\gset
\echo holder 1 leases sku-1 with token :first, counts 100, and is paused

-- The lease is granted as soon as the lease of holder 1 has expired.
\set lease `curl -sS --fail --max-time 10 --json '{"ttl_ms": 500, "wait_ms": 5000}' :'issuer'/sku-1`
SELECT :'lease'::json ->> 'token' AS second
\gset
\echo holder 2 leases sku-1 with token :second, counts 96, and writes that

BEGIN;
SET LOCAL lock_timeout = '5s';
SET LOCAL idle_in_transaction_session_timeout = '15s';
SET LOCAL client_connection_check_interval = '1s';
-- The admission comes first, in its own statement. It locks the row until COMMIT.
SELECT tower_fence.admit('sku-1', :second) AS max_token
\gset
INSERT INTO inventory (sku, stock) VALUES ('sku-1', 96) ON CONFLICT (sku) DO UPDATE SET stock = excluded.stock;
COMMIT;

\echo holder 1 wakes up, and writes its 100

BEGIN;
SET LOCAL lock_timeout = '5s';
SET LOCAL idle_in_transaction_session_timeout = '15s';
SET LOCAL client_connection_check_interval = '1s';
\set ON_ERROR_STOP off
SELECT tower_fence.admit('sku-1', :first) AS max_token
\gset
\set ON_ERROR_STOP on
\if :ERROR
    \echo refused: :SQLSTATE
    ROLLBACK;
\else
    INSERT INTO inventory (sku, stock) VALUES ('sku-1', 100) ON CONFLICT (sku) DO UPDATE SET stock = excluded.stock;
    COMMIT;
    DO $$ BEGIN RAISE 'holder 1 has written over holder 2'; END $$;
\endif

SELECT 'the stock is ' || stock FROM inventory WHERE sku = 'sku-1';
