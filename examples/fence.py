"""A paused holder and its successor, with Python and psycopg 3.

    export DATABASE_URL=postgres://localhost/shop
    cargo run --example inventory       # the issuer, which creates the tables and functions
    python3 examples/fence.py           # in another terminal

ISSUER_URL is the address of the issuer (default http://127.0.0.1:3000/locks). To install psycopg, use
the Debian package python3-psycopg or `pip install "psycopg[binary]"`.
"""

import json
import os
import sys
from urllib.parse import quote
from urllib.request import Request, urlopen

import psycopg

ISSUER = os.environ.get("ISSUER_URL", "http://127.0.0.1:3000/locks")


def acquire(sku, ttl_ms=30_000):
    """Acquires the lease. If another holder has it, the request waits for up to five seconds."""
    body = json.dumps({"ttl_ms": ttl_ms, "wait_ms": 5_000}).encode()
    headers = {"Content-Type": "application/json"}
    request = Request(f"{ISSUER}/{quote(sku, safe='')}", body, headers, method="POST")
    with urlopen(request, timeout=10) as answer:
        return json.load(answer)


def release(lease):
    headers = {"Lease-Id": lease["lease_id"]}
    url = f"{ISSUER}/{quote(lease['resource'], safe='')}"
    urlopen(Request(url, headers=headers, method="DELETE"), timeout=10).close()


def set_stock(conn, sku, token, stock):
    """Checks the token and writes in one transaction. A refusal rolls it back."""
    with conn.transaction():
        conn.execute("SET LOCAL lock_timeout = '5s'")
        conn.execute("SELECT tower_fence.admit(%s, %s)", [sku, token])
        conn.execute(
            "INSERT INTO inventory (sku, stock) VALUES (%s, %s)"
            " ON CONFLICT (sku) DO UPDATE SET stock = excluded.stock",
            [sku, stock],
        )


with psycopg.connect(os.environ["DATABASE_URL"], autocommit=True) as conn:
    first = acquire("sku-1", ttl_ms=500)
    print(f"holder 1 leases sku-1 with token {first['token']}, counts 100, and is paused")

    second = acquire("sku-1")  # granted as soon as the lease of holder 1 has expired
    print(f"holder 2 leases sku-1 with token {second['token']}, counts 96, and writes that")
    set_stock(conn, "sku-1", second["token"], 96)
    release(second)

    print("holder 1 wakes up, and writes its 100")
    try:
        set_stock(conn, "sku-1", first["token"], 100)
    except psycopg.Error as refused:
        if refused.sqlstate != "TF412":
            raise
        print(f"refused: {refused.sqlstate} {refused.diag.message_primary}")
        print(refused.diag.message_detail)  # the problem document
    else:
        sys.exit("holder 1 has written over holder 2")

    [stock] = conn.execute("SELECT stock FROM inventory WHERE sku = 'sku-1'").fetchone()
    print(f"the stock is {stock}")
