"""The functions of the schema tower_fence, called with psycopg 3."""

import json
import os
from datetime import timedelta

import psycopg

conn = psycopg.connect(os.environ["DATABASE_URL"], autocommit=True)


def set_stock(sku, token, stock):
    """Admits the token and writes, in one transaction, which any error rolls back."""
    with conn.transaction():
        conn.execute("SET LOCAL lock_timeout = '5s'")
        conn.execute("SET LOCAL idle_in_transaction_session_timeout = '15s'")
        conn.execute("SET LOCAL client_connection_check_interval = '1s'")
        admitted = conn.execute("SELECT tower_fence.admit(%s, %s)", [sku, token])
        conn.execute("UPDATE inventory SET stock = %s WHERE sku = %s", [stock, sku])
    return admitted.fetchone()[0]


def call(sql, *args):
    """Runs one statement, and returns the first value."""
    return conn.execute(sql, args).fetchone()[0]


def show(name, *values):
    print(f"{name}:", *(v if isinstance(v, str) else json.dumps(v) for v in values))


show("max_token", call("SELECT tower_fence.max_token(%s)", "sku-1"))

conn.execute("SET lock_timeout = '5s'")  # acquire() may wait for a write in progress
acquire = "SELECT token, lease_id FROM tower_fence.acquire(%s, %s, owner => %s)"
ttl = timedelta(seconds=30)
first, lease_id = conn.execute(acquire, ["sku-1", ttl, "worker-1"]).fetchone()
show("acquire", first)
try:
    conn.execute(acquire, ["sku-1", ttl, "worker-2"])
except psycopg.Error as error:
    if error.sqlstate != "TF409":  # another holder has the lease
        raise
    show("acquire", error.sqlstate, json.loads(error.diag.message_detail)["resource"])

held = conn.execute("SELECT resource, token, owner FROM tower_fence.held_leases")
show("held_leases", *held.fetchone())

renew = "SELECT tower_fence.renew(%s, %s, new_token => true, ttl_ms => %s)"
second = call(renew, "sku-1", lease_id, 30_000)
show("renew", second)

show("admit", set_stock("sku-1", second, 9))
try:
    set_stock("sku-1", first, 100)
except psycopg.Error as error:
    if error.sqlstate != "TF412":  # the token is stale
        raise
    stale = json.loads(error.diag.message_detail)
    show("admit", error.sqlstate, stale["presented_token"], stale["max_token"])
else:
    raise SystemExit("the stale token was admitted")

field = f'{second};resource="sku-1", 7;resource="sku-2"'  # the header, as it arrived
with conn.transaction():
    show("admit_header", call("SELECT tower_fence.admit_header(%s, %s)", field, "sku-2"))
    conn.execute("UPDATE inventory SET stock = %s WHERE sku = %s", [4, "sku-2"])

show("release", call("SELECT tower_fence.release(%s, %s)", "sku-1", lease_id))
show("break_lease", call("SELECT tower_fence.break_lease(%s)", "sku-1"))
show("raise", call("SELECT tower_fence.raise(%s, %s)", "sku-1", 5_000_000_000))
show("max_token", call("SELECT tower_fence.max_token(%s)", "sku-1"))

show("protect", call("SELECT tower_fence.protect(%s, %s)", "inventory", "{sku}"))
try:
    conn.execute("UPDATE inventory SET stock = 0")
except psycopg.Error as error:
    if error.sqlstate != "TF428":  # a write without an admission
        raise
    show("unfenced write", error.sqlstate, json.loads(error.diag.message_detail)["resource"])
else:
    raise SystemExit("a protected table was written without an admission")
with conn.transaction():
    show("bypass", call("SELECT tower_fence.bypass(%s)", "counted by hand"))
    conn.execute("UPDATE inventory SET stock = %s WHERE sku = %s", [8, "sku-1"])
show("unprotect", call("SELECT tower_fence.unprotect(%s)", "inventory"))

# The procedure commits, so it is called outside a transaction.
age = timedelta(days=30)
show("remove_idle", call("CALL tower_fence.remove_idle(%s, max_rows => 1)", age))
show("remove_idle", call("CALL tower_fence.remove_idle(older_than_ms => %s)", 2_592_000_000))

stock = conn.execute("SELECT stock FROM inventory ORDER BY sku")
show("stock", *(n for [n] in stock))
