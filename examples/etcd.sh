#!/bin/sh
# A write under a lock of etcd, with the revision of the lock as its fencing token.
#
#     cargo run --example inventory
#     etcdctl lock nut -- examples/etcd.sh nut      # in another terminal, with ETCDCTL_API=3
#
# etcdctl takes the lock and runs this with ETCD_LOCK_REV, the store's revision at that moment: each later holder
# has a higher one. It keeps its lease while this runs, but does not stop it when the lease is lost. So freeze both while
# this thinks (`kill -STOP`) for as long as the lease lasts, run the line above once more, and have them go on
# (`kill -CONT`): the write is refused.
#
# INVENTORY_URL is the address of the service, THINKING how long this thinks, in seconds. TOKEN_OFFSET is added to each
# token, by all holders: for an etcd whose revisions have gone back.
set -eu
sku=$1
url=${INVENTORY_URL:-http://127.0.0.1:3000/inventory}/$sku
token=$((ETCD_LOCK_REV + ${TOKEN_OFFSET:-0}))
field="Fencing-Token: $token;resource=\"$sku\""

# With the token: when this is answered, nobody older can write any more.
stock=$(curl --silent --show-error --header "$field" "$url" | sed -n 's/.*"stock":\([0-9]*\).*/\1/p')
stock=${stock:-100} # of a new one
echo "holder $$ has the lock with token $token, and counts $stock"
sleep "${THINKING:-5}"

curl --silent --show-error --output /dev/null --write-out 'answered %{http_code}\n' \
    --request PUT --header "$field" --json "{\"stock\": $((stock - 1))}" "$url"
