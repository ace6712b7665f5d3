"""A paused holder is refused: leases from the server `tower-fence` over HTTP, and writes with psycopg 3.

    export DATABASE_URL=postgres://localhost/shop TOWER_FENCE_DATABASE_URL=postgres://localhost/shop
    tower-fence serve --migrate                 # in another terminal
    python3 tests/program/lease.py

TOWER_FENCE_URL is the address of the server (default: http://127.0.0.1:4120). TOWER_FENCE_SECRET is
the secret of a holder, if the server requires one.
"""

import json
import os
import sys
import time
from contextlib import suppress
from threading import Event, Thread
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import HTTPRedirectHandler, Request, build_opener

import psycopg

LOCKS = os.environ.get("TOWER_FENCE_URL", "http://127.0.0.1:4120") + "/locks/"
SECRET = os.environ.get("TOWER_FENCE_SECRET", "")


class NoRedirects(HTTPRedirectHandler):
    """Raises HTTPError for a redirect. Otherwise urllib would send a GET, even to another server."""

    def redirect_request(self, *_):
        return None


def call(method, resource, body=None, timeout=70, **headers):
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {SECRET}"} | headers
    body = None if body is None else json.dumps(body).encode()
    request = Request(LOCKS + quote(resource, safe=""), body, headers, method=method)
    opener = build_opener(NoRedirects)
    with opener.open(request, timeout=timeout) as answer:  # HTTPError: 409 the lease is held, or lost
        return json.load(answer) if answer.status != 204 else None


def acquire(resource, ttl_ms=30_000, wait_ms=10_000):
    return call("POST", resource, {"ttl_ms": ttl_ms, "wait_ms": wait_ms, "owner": "lease.py"})


def renew(lease, ttl_ms=30_000, timeout=10):
    headers = {"Lease-Id": lease["lease_id"]}
    return call("PUT", lease["resource"], {"ttl_ms": ttl_ms}, timeout, **headers)


def keep(lease, done, lost, ttl_ms=30_000):
    """Renews the lease at each third of its TTL until `done` is set, or sets `lost`."""
    ttl, expiry, pause = ttl_ms / 1000, 0, 0
    while not done.wait(pause):
        sent = time.monotonic()
        try:
            limit = min(ttl / 3, expiry - sent) if expiry else ttl / 3
            renew(lease, ttl_ms, timeout=limit)["token"]  # KeyError: the answer comes from a proxy
            expiry, pause = sent + ttl, ttl / 3
        except Exception as error:
            if getattr(error, "code", 503) < 500:  # an HTTPError: the renewal is refused
                expiry = 0
            pause = ttl / 10  # otherwise no valid answer, or a temporary failure: retry
        if time.monotonic() + pause >= expiry:
            return lost.set()


def release(lease):
    with suppress(OSError):  # not released: the lease expires, and the write remains committed
        call("DELETE", lease["resource"], timeout=10, **{"Lease-Id": lease["lease_id"]})


def set_stock(conn, lease, stock):
    with conn.transaction():  # a refusal rolls back: psycopg.Error, sqlstate "TF412"
        conn.execute("SET LOCAL lock_timeout = '5s'")
        conn.execute("SET LOCAL idle_in_transaction_session_timeout = '15s'")
        conn.execute("SET LOCAL client_connection_check_interval = '1s'")
        conn.execute("SELECT tower_fence.admit(%s, %s)", [lease["resource"], lease["token"]])
        conn.execute("UPDATE stock SET n = %s WHERE sku = %s", [stock, lease["resource"]])


with psycopg.connect(os.environ["DATABASE_URL"], autocommit=True) as conn:
    conn.execute("CREATE TABLE IF NOT EXISTS stock (sku text PRIMARY KEY, n bigint NOT NULL)")
    conn.execute("INSERT INTO stock VALUES ('sku-1', 100) ON CONFLICT (sku) DO UPDATE SET n = 100")

    first = acquire("sku-1", ttl_ms=300)
    first = renew(first, ttl_ms=300)
    print(f"holder 1 leases sku-1 with token {first['token']}, and is paused")

    second = acquire("sku-1")  # waits in the queue until the lease of holder 1 has expired
    done, lost = Event(), Event()
    Thread(target=keep, args=(second, done, lost), daemon=True).start()
    set_stock(conn, second, 96)
    print(f"holder 2 leases sku-1 with token {second['token']}, and writes 96")

    try:
        renew(first)
    except HTTPError as refused:
        print(f"holder 1 wakes up, and cannot renew: {refused.status} {json.load(refused)['title']}")
    try:
        set_stock(conn, first, 100)
    except psycopg.Error as refused:
        if refused.sqlstate != "TF412":
            raise
        print(f"holder 1 writes 100 all the same: {refused.sqlstate} {refused.diag.message_primary}")
    else:
        sys.exit("holder 1 has written over holder 2")
    if lost.is_set():
        sys.exit("holder 2 has lost its lease")
    done.set()
    release(second)
    [stock] = conn.execute("SELECT n FROM stock WHERE sku = 'sku-1'").fetchone()
    print(f"the stock is {stock}")
