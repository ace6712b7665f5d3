#!/bin/sh
# A write under an etcd lock, with the lock's revision as its fencing token.
#
#     cargo run --example inventory
#     etcdctl lock nut -- examples/etcd.sh nut      # in another terminal, with ETCDCTL_API=3
#
# etcdctl acquires the lock and runs this script with ETCD_LOCK_REV, the store's revision at that
# moment. Each later holder therefore has a higher token. etcdctl renews its lease while the script
# runs, but does not stop the script if the lease is lost.
#
# To see the refusal, pause both processes during the sleep (`kill -STOP`) until the lease has
# expired. Run the command above again, and then resume the paused processes (`kill -CONT`). Their
# write is refused.
#
# INVENTORY_URL is the address of the service. THINKING is the time between the read and the write,
# in seconds. TOKEN_OFFSET is added to each token, and must be the same for all holders. Set it if
# etcd's revisions have decreased.
set -eu
sku=$1
case $sku in
    '' | *[!A-Za-z0-9._-]*) echo "this example supports only SKUs of A-Z a-z 0-9 . _ -" >&2; exit 1 ;;
esac
url=${INVENTORY_URL:-http://127.0.0.1:3000/inventory}/$sku
token=$((ETCD_LOCK_REV + ${TOKEN_OFFSET:-0}))
field="Fencing-Token: $token;resource=\"$sku\""

# The read carries the token. Once it has been answered, earlier holders can no longer write. If the
# service does not respond, curl stops after 10 seconds, and the lock is released.
answer=$(curl --silent --show-error --max-time 10 --header "$field" --write-out '\n%{http_code}' "$url")
status=${answer##*
}
case $status in
    200) stock=$(printf '%s' "$answer" | sed -n 's/.*"stock":\([0-9]*\).*/\1/p') ;;
    404) stock=100 ;; # a new SKU
    *) stock= ;;
esac
echo "holder $$ has the lock with token $token, and counts ${stock:-nothing}"
if [ -z "$stock" ]; then
    echo "answered $status"
    exit 1
fi
sleep "${THINKING:-5}"

status=$(curl --silent --show-error --max-time 10 --output /dev/null --write-out '%{http_code}' \
    --request PUT --header "$field" --json "{\"stock\": $((stock - 1))}" "$url")
echo "answered $status"
case $status in 2*) ;; *) exit 1 ;; esac
