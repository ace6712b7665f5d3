"""The functions of the schema tower_fence, called with SQLAlchemy 2 over psycopg 3."""

import json
import os
from datetime import timedelta

from sqlalchemy import create_engine, make_url, text
from sqlalchemy.exc import DBAPIError

url = make_url(os.environ["DATABASE_URL"]).set(drivername="postgresql+psycopg")
# acquire() may wait for a write in progress.
engine = create_engine(url, connect_args={"options": "-c lock_timeout=5s"})


def set_stock(sku, token, stock):
    """Admits the token and writes, in one transaction, which any error rolls back."""
    with engine.begin() as conn:
        conn.execute(text("SET LOCAL lock_timeout = '5s'"))
        conn.execute(text("SET LOCAL idle_in_transaction_session_timeout = '15s'"))
        conn.execute(text("SET LOCAL client_connection_check_interval = '1s'"))
        admit = text("SELECT tower_fence.admit(:sku, :token)")
        max_token = conn.scalar(admit, {"sku": sku, "token": token})
        write = text("UPDATE inventory SET stock = :stock WHERE sku = :sku")
        conn.execute(write, {"sku": sku, "stock": stock})
    return max_token


def call(sql, **args):
    """Runs one statement in its own transaction, and returns the first row."""
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as conn:
        return conn.execute(text(sql), args).first()


def show(name, *values):
    print(f"{name}:", *(v if isinstance(v, str) else json.dumps(v) for v in values))


show("max_token", *call("SELECT tower_fence.max_token(:sku)", sku="sku-1"))

acquire = "SELECT token, lease_id FROM tower_fence.acquire(:sku, :ttl, owner => :owner)"
ttl = timedelta(seconds=30)
first, lease_id = call(acquire, sku="sku-1", ttl=ttl, owner="worker-1")
show("acquire", first)
try:
    call(acquire, sku="sku-1", ttl=ttl, owner="worker-2")
except DBAPIError as error:
    if error.orig.sqlstate != "TF409":  # another holder has the lease
        raise
    detail = json.loads(error.orig.diag.message_detail)
    show("acquire", error.orig.sqlstate, detail["resource"])

show("held_leases", *call("SELECT resource, token, owner FROM tower_fence.held_leases"))

renew = "SELECT tower_fence.renew(:sku, :lease_id, new_token => true, ttl_ms => :ttl_ms)"
[second] = call(renew, sku="sku-1", lease_id=lease_id, ttl_ms=30_000)
show("renew", second)

show("admit", set_stock("sku-1", second, 9))
try:
    set_stock("sku-1", first, 100)
except DBAPIError as error:
    if error.orig.sqlstate != "TF412":  # the token is stale
        raise
    stale = json.loads(error.orig.diag.message_detail)
    show("admit", error.orig.sqlstate, stale["presented_token"], stale["max_token"])
else:
    raise SystemExit("the stale token was admitted")

with engine.begin() as conn:
    field = f'{second};resource="sku-1", 7;resource="sku-2"'  # the header, as it arrived
    admit_header = text("SELECT tower_fence.admit_header(:field, :sku)")
    show("admit_header", conn.scalar(admit_header, {"field": field, "sku": "sku-2"}))
    conn.execute(text("UPDATE inventory SET stock = 4 WHERE sku = 'sku-2'"))

show("release", *call("SELECT tower_fence.release(:sku, :id)", sku="sku-1", id=lease_id))
show("break_lease", *call("SELECT tower_fence.break_lease(:sku)", sku="sku-1"))
show("raise", *call("SELECT tower_fence.raise(:sku, :token)", sku="sku-1", token=5_000_000_000))
show("max_token", *call("SELECT tower_fence.max_token(:sku)", sku="sku-1"))

protect = "SELECT tower_fence.protect(:relation, :pattern)"
show("protect", *call(protect, relation="inventory", pattern="{sku}"))
try:
    with engine.begin() as conn:
        conn.execute(text("UPDATE inventory SET stock = 0"))
except DBAPIError as error:
    if error.orig.sqlstate != "TF428":  # a write without an admission
        raise
    detail = json.loads(error.orig.diag.message_detail)
    show("unfenced write", error.orig.sqlstate, detail["resource"])
else:
    raise SystemExit("a protected table was written without an admission")
with engine.begin() as conn:
    bypass = text("SELECT tower_fence.bypass(:reason)")
    show("bypass", conn.scalar(bypass, {"reason": "counted by hand"}))
    conn.execute(text("UPDATE inventory SET stock = 8 WHERE sku = 'sku-1'"))
show("unprotect", *call("SELECT tower_fence.unprotect(:relation)", relation="inventory"))

# The procedure commits, so it is called outside a transaction.
age = timedelta(days=30)
show("remove_idle", *call("CALL tower_fence.remove_idle(:age, max_rows => 1)", age=age))
show("remove_idle", *call("CALL tower_fence.remove_idle(older_than_ms => :ms)", ms=2_592_000_000))

with engine.connect() as conn:
    show("stock", *conn.scalars(text("SELECT stock FROM inventory ORDER BY sku")))
