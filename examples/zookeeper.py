"""A write under a lock of ZooKeeper, with the czxid of its node as the fencing token.

    cargo run --example inventory
    python3 examples/zookeeper.py bolt      # in another terminal

takes the lock, reads, thinks, and writes. Freeze it while it thinks (`kill -STOP`) until its session has ended, run a second
one, and have the first go on (`kill -CONT`): its write is refused.

ZOOKEEPER_HOSTS is the address of ZooKeeper, 127.0.0.1:2181 unless it is set; INVENTORY_URL that of the service; THINKING says
how long it thinks, and SESSION how long a session lasts, in seconds. kazoo is the package python3-kazoo of Debian, or
`pip install kazoo`.
"""

import json
import os
import sys
import time
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from kazoo.client import KazooClient

sku = sys.argv[1]
url = os.environ.get("INVENTORY_URL", "http://127.0.0.1:3000/inventory") + "/" + sku


def call(method, token, body=None):
    """The status and the body of an answer. Whatever is asked, the token goes with it."""
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
# The node of this holder, not its parent: each later holder has made its node later. Not the number in the name of the node,
# which begins anew with the parent.
node = zookeeper.exists(f"{lock.path}/{lock.node}")
if node is None:
    sys.exit("the session is over, and the lock with it")
token = node.czxid

# With the token: when this is answered, nobody older can write any more.
status, body = call("GET", token)
stock = json.loads(body)["stock"] if status == 200 else 100  # of a new one
print(f"holder {os.getpid()} has the lock with token {token}, and counts {stock}", flush=True)
time.sleep(float(os.environ.get("THINKING", "5")))

status, _ = call("PUT", token, {"stock": stock - 1})
print(f"answered {status}", flush=True)
zookeeper.stop()  # the lock goes with the session
