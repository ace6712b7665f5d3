"""A worker that decrements the stock of a SKU under a lease, with Python's standard library.

    python3 worker.py sku-1

It needs Python 3.11 or later. The README has the environment variables.
"""

import asyncio
import json
import os
import sys
from contextlib import asynccontextmanager
from http.client import HTTPException
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import HTTPRedirectHandler, Request, build_opener
from uuid import uuid4

LOCKS = os.environ.get("TOWER_FENCE_URL", "http://127.0.0.1:4120") + "/locks/"
SECRET = os.environ.get("TOWER_FENCE_SECRET", "")
SERVICE = os.environ.get("SERVICE_URL", "http://127.0.0.1:8000") + "/inventory/"
TTL_MS = int(os.environ.get("TTL_MS", 30_000))
WORK_MS = int(os.environ.get("WORK_MS", 5_000))
WAIT_MS = 10_000
TTL = TTL_MS / 1000


class LeaseLost(Exception):
    """The lease has expired or was broken, and another holder may have it."""


class NoRedirects(HTTPRedirectHandler):
    """Raises HTTPError for a redirect. Otherwise urllib would send a GET, even to another server."""

    def redirect_request(self, *_):
        return None


async def call(method, url, headers={}, body=None, timeout=15):
    """Returns the JSON of the response.

    Raises HTTPError if the server refuses, and another OSError if there is no complete response.
    """

    def send():
        data = None if body is None else json.dumps(body).encode()
        request = Request(url, data, {"Content-Type": "application/json"} | headers, method=method)
        try:
            with build_opener(NoRedirects).open(request, timeout=timeout) as response:
                return json.loads(response.read() or "null")
        except (HTTPException, ValueError) as error:  # neither is an OSError
            raise ConnectionError(f"invalid response: {error!r}") from error

    return await asyncio.to_thread(send)


def may_pass(error):
    """Whether a retry may succeed: the server is unavailable, or did not respond."""
    return not isinstance(error, HTTPError) or error.code >= 500


async def acquire(url, headers):
    """Acquires the lease, and returns its Fencing-Token.

    A retry under the same lease id returns the lease that an earlier request was granted.
    """
    body = {"ttl_ms": TTL_MS, "wait_ms": WAIT_MS, "owner": "worker.py"}
    body["lease_id"] = headers["Lease-Id"]
    for retries_left in (2, 1, 0):
        try:
            granted = await call("POST", url, headers, body, timeout=WAIT_MS / 1000 + 5)
            return granted["fencing_token"]
        except OSError as error:
            if retries_left == 0 or not may_pass(error):
                raise
        await asyncio.sleep(1)


async def renew(url, headers):
    """Renews the lease, and returns its expiry, measured from before the request."""
    sent = asyncio.get_running_loop().time()
    renewed = await call("PUT", url, headers, {"ttl_ms": TTL_MS}, timeout=TTL / 3)
    if "fencing_token" not in (renewed or {}):
        raise ConnectionError("the response to the renewal comes from a proxy")
    return sent + TTL


async def keep(url, headers, expiry):
    """Renews the lease at each third of its TTL, and updates its expiry.

    If a renewal is refused, the expiry is set to now. If the server does not respond, the renewal
    is retried.
    """
    pause = TTL / 3
    while True:
        await asyncio.sleep(pause)
        try:
            end, pause = await renew(url, headers), TTL / 3
        except OSError as error:
            end, pause = asyncio.get_running_loop().time(), TTL / 10
            if may_pass(error):
                continue
        if expiry.expired():
            return
        expiry.reschedule(end)


@asynccontextmanager
async def lease(resource):
    """Holds a lease during the block, and yields its Fencing-Token.

    If the lease is lost, the block is cancelled, and LeaseLost is raised.
    """
    url = LOCKS + quote(resource, safe="")
    # Each acquisition has a new lease id.
    headers = {"Authorization": f"Bearer {SECRET}", "Lease-Id": str(uuid4())}
    try:
        token = await acquire(url, headers)
        # The acquisition may have waited for longer than the TTL. A renewal returns the expiry.
        expiry = asyncio.timeout_at(await renew(url, headers))
        try:
            async with expiry:
                renewals = asyncio.create_task(keep(url, headers, expiry))
                try:
                    yield token
                finally:
                    renewals.cancel()
        except TimeoutError as error:
            raise (LeaseLost(resource) if expiry.expired() else error)
    finally:
        try:
            await call("DELETE", url, headers)
        except OSError:
            pass  # the lease is lost, or expires by itself


async def main(sku):
    url = SERVICE + quote(sku, safe="")
    try:
        async with lease(sku) as token:
            stock = (await call("GET", url))["stock"]
            print(f"the stock is {stock}, read under the token {token}", flush=True)
            await asyncio.sleep(WORK_MS / 1000)  # the work
            await call("PUT", url, {"Fencing-Token": token}, {"stock": stock - 1})
            print(f"the stock is {stock - 1} now")
    except LeaseLost:
        sys.exit("the lease is lost: stopped")
    except HTTPError as refusal:
        sys.exit(f"refused with {refusal.code}: {refusal.read().decode()}")
    except OSError as error:
        sys.exit(f"no response: {error}")


asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "sku-1"))
