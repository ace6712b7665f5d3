"""The functions of the schema tower_fence, called with asyncpg."""

import asyncio
import json
import os
from datetime import timedelta

import asyncpg


async def set_stock(conn, sku, token, stock):
    """Admits the token and writes, in one transaction, which any error rolls back."""
    async with conn.transaction():
        await conn.execute("SET LOCAL lock_timeout = '5s'")
        await conn.execute("SET LOCAL idle_in_transaction_session_timeout = '15s'")
        await conn.execute("SET LOCAL client_connection_check_interval = '1s'")
        max_token = await conn.fetchval("SELECT tower_fence.admit($1, $2)", sku, token)
        await conn.execute("UPDATE inventory SET stock = $1 WHERE sku = $2", stock, sku)
    return max_token


def show(name, *values):
    print(f"{name}:", *(v if isinstance(v, str) else json.dumps(v) for v in values))


async def main():
    conn = await asyncpg.connect(os.environ["DATABASE_URL"])
    call = conn.fetchval  # one statement, in a transaction of its own
    show("max_token", await call("SELECT tower_fence.max_token($1)", "sku-1"))

    await conn.execute("SET lock_timeout = '5s'")  # acquire() may wait for a write in progress
    acquire = "SELECT token, lease_id FROM tower_fence.acquire($1, $2, owner => $3)"
    ttl = timedelta(seconds=30)
    first, lease_id = await conn.fetchrow(acquire, "sku-1", ttl, "worker-1")
    show("acquire", first)
    try:
        await conn.fetchrow(acquire, "sku-1", ttl, "worker-2")
    except asyncpg.PostgresError as error:
        if error.sqlstate != "TF409":  # another holder has the lease
            raise
        show("acquire", error.sqlstate, json.loads(error.detail)["resource"])

    held = await conn.fetchrow("SELECT resource, token, owner FROM tower_fence.held_leases")
    show("held_leases", *held)

    renew = "SELECT tower_fence.renew($1, $2, new_token => true, ttl_ms => $3)"
    second = await call(renew, "sku-1", lease_id, 30_000)
    show("renew", second)

    show("admit", await set_stock(conn, "sku-1", second, 9))
    try:
        await set_stock(conn, "sku-1", first, 100)
    except asyncpg.PostgresError as error:
        if error.sqlstate != "TF412":  # the token is stale
            raise
        stale = json.loads(error.detail)
        show("admit", error.sqlstate, stale["presented_token"], stale["max_token"])
    else:
        raise SystemExit("the stale token was admitted")

    async with conn.transaction():
        field = f'{second};resource="sku-1", 7;resource="sku-2"'  # the header, as it arrived
        admit_header = "SELECT tower_fence.admit_header($1, $2)"
        show("admit_header", await conn.fetchval(admit_header, field, "sku-2"))
        await conn.execute("UPDATE inventory SET stock = $1 WHERE sku = $2", 4, "sku-2")

    show("release", await call("SELECT tower_fence.release($1, $2)", "sku-1", lease_id))
    show("break_lease", await call("SELECT tower_fence.break_lease($1)", "sku-1"))
    show("raise", await call("SELECT tower_fence.raise($1, $2)", "sku-1", 5_000_000_000))
    show("max_token", await call("SELECT tower_fence.max_token($1)", "sku-1"))

    show("protect", await call("SELECT tower_fence.protect($1, $2)", "inventory", "{sku}"))
    try:
        await conn.execute("UPDATE inventory SET stock = 0")
    except asyncpg.PostgresError as error:
        if error.sqlstate != "TF428":  # a write without an admission
            raise
        show("unfenced write", error.sqlstate, json.loads(error.detail)["resource"])
    else:
        raise SystemExit("a protected table was written without an admission")
    async with conn.transaction():
        show("bypass", await conn.fetchval("SELECT tower_fence.bypass($1)", "counted by hand"))
        await conn.execute("UPDATE inventory SET stock = $1 WHERE sku = $2", 8, "sku-1")
    show("unprotect", await call("SELECT tower_fence.unprotect($1)", "inventory"))

    # The procedure commits, so it is called outside a transaction.
    age = timedelta(days=30)
    show("remove_idle", await call("CALL tower_fence.remove_idle($1, max_rows => 1)", age))
    ms = 2_592_000_000
    show("remove_idle", await call("CALL tower_fence.remove_idle(older_than_ms => $1)", ms))

    stock = await conn.fetch("SELECT stock FROM inventory ORDER BY sku")
    show("stock", *(row["stock"] for row in stock))
    await conn.close()


asyncio.run(main())
