"""A write under a ZooKeeper lock, with the czxid of its node as the fencing token.

    cargo run --example inventory
    python3 examples/zookeeper.py bolt      # in another terminal

The program acquires the lock, reads, sleeps, and writes. Pause it during the sleep (`kill -STOP`) until
its session has expired. Run a second instance, and then resume the first one (`kill -CONT`). The write
of the first instance is refused.

ZOOKEEPER_HOSTS is the address of ZooKeeper (default 127.0.0.1:2181), and INVENTORY_URL is the address
of the service. THINKING is the time between the read and the write, and SESSION is the timeout of the
session, both in seconds. To install kazoo, use the Debian package python3-kazoo or `pip install kazoo`.
"""

import json
import os
import re
import sys
import time
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from kazoo.client import KazooClient

sku = sys.argv[1]
if not re.fullmatch(r"[A-Za-z0-9._-]+", sku):
    sys.exit("this example supports only SKUs of A-Z a-z 0-9 . _ -")
url = os.environ.get("INVENTORY_URL", "http://127.0.0.1:3000/inventory") + "/" + sku


def call(method, token, body=None):
    """Returns the status and the body of the response. Every request carries the token."""
    headers = {"Fencing-Token": f'{token};resource="{sku}"', "Content-Type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    try:
        with urlopen(Request(url, data, headers, method=method), timeout=10) as answer:
            return answer.status, answer.read()
    except HTTPError as refused:
        return refused.code, refused.read()


zookeeper = KazooClient(
    os.environ.get("ZOOKEEPER_HOSTS", "127.0.0.1:2181"),
    timeout=float(os.environ.get("SESSION", "10")),
)
zookeeper.start()
lock = zookeeper.Lock(f"/locks/{sku}")
lock.acquire()
# Use the czxid of this holder's node, not of its parent. Each later holder creates its node later.
# The number in the node's name is not usable, because it starts again if the parent is created
# again.
node = zookeeper.exists(f"{lock.path}/{lock.node}")
if node is None:
    sys.exit("the session has expired, and the lock is lost")
token = node.czxid

# The read carries the token. Once it has been answered, earlier holders can no longer write.
status, body = call("GET", token)
stock = None
if status == 200:
    stock = json.loads(body)["stock"]
elif status == 404:
    stock = 100  # a new SKU
print(f"holder {os.getpid()} has the lock with token {token}, and counts {stock}", flush=True)
if stock is not None:
    time.sleep(float(os.environ.get("THINKING", "5")))
    status, _ = call("PUT", token, {"stock": stock - 1})
print(f"answered {status}", flush=True)
zookeeper.stop()  # ends the session, which releases the lock
sys.exit(not 200 <= status < 300)
