"""The example of the paused holder, with a generated client: python generated_client.py URL"""

import sys
import time

from inventory import Client
from inventory.api.inventory import decrement_stock, set_stock, show_stock
from inventory.api.leases import acquire_lease, inspect_lock, release_lease, renew_lease
from inventory.models import (
    AcquireLease,
    InvalidRequestProblem,
    Lease,
    LeaseLostProblem,
    Level,
    LockHeldProblem,
    NewStock,
    NotFound,
    Order,
    RenewLease,
    StaleTokenProblem,
)

SKU = "sku-1"


def expect(kind, answer):
    if not isinstance(answer, kind):
        sys.exit(f"expected {kind.__name__}, got {answer}")
    return answer


client = Client(base_url=sys.argv[1])
expect(NotFound, show_stock.sync(SKU, client=client))
expect(InvalidRequestProblem, acquire_lease.sync(SKU, client=client, body=AcquireLease(ttl_ms=1)))

first = expect(Lease, acquire_lease.sync(SKU, client=client, body=AcquireLease(ttl_ms=200, owner="holder 1")))
held = expect(LockHeldProblem, acquire_lease.sync(SKU, client=client))
assert held.resource == SKU and held.status == 409, held
state = inspect_lock.sync(SKU, client=client)
assert state.held and state.owner == "holder 1" and state.token == first.token, state
print(f"holder 1 leases {SKU}, and is paused", flush=True)

second = acquire_lease.sync(SKU, client=client)
while isinstance(second, LockHeldProblem):
    time.sleep(second.retry_after_ms / 1000)
    second = acquire_lease.sync(SKU, client=client)
expect(Lease, second)
level = expect(Level, set_stock.sync(SKU, client=client, fencing_token=second.fencing_token, body=NewStock(stock=10)))
print(f"holder 2 has written: the stock is {level.stock}", flush=True)

stale = decrement_stock.sync(SKU, client=client, fencing_token=first.fencing_token, body=Order(quantity=1))
expect(StaleTokenProblem, stale)
assert stale.status == 412, stale
assert (stale.resource, stale.presented_token, stale.max_token) == (SKU, first.token, second.token), stale
print(f"holder 1 is refused: {stale.type_.split('#')[1]}", flush=True)

expect(LeaseLostProblem, renew_lease.sync(SKU, client=client, lease_id=first.lease_id))
again = expect(Lease, renew_lease.sync(SKU, client=client, lease_id=second.lease_id, body=RenewLease(new_token=True)))
# A repeated request with an idempotency key is executed once.
for _ in range(2):
    order, key = Order(quantity=1), '"order-7"'
    token = again.fencing_token
    level = decrement_stock.sync(SKU, client=client, fencing_token=token, idempotency_key=key, body=order)
    assert expect(Level, level).stock == 9, level
released = release_lease.sync_detailed(SKU, client=client, lease_id=second.lease_id)
assert released.status_code == 204, released
