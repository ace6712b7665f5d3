-- Grants a lease, adds the request to the queue, or reports how long the resource stays blocked.
-- ARGV: …, lease id, ticket of the request, sum of ttl and lock delay in ms, lock delay in ms,
-- owner, and one of these words: `no` if the request does not wait, `leaves` if it no longer waits,
-- or `waits`. After `waits`, three arguments follow: the timeout in ms, the channel of the
-- request's issuer, and 1 if the request was in the queue before.
-- Returns {'granted', …} (acquire_first.lua: only the token), {'held', ms left}, {'queued', ms
-- left, 1 if it was not in the queue before}, {'displaced'}, or the reply of `needs_epoch`.
local id, ticket, owner, mode = ARGV[6], ARGV[7], ARGV[10], ARGV[11]
local delay = tonumber(ARGV[9])
local ttl = tonumber(ARGV[8]) - delay

local held = current()
if not held then
  local now = counter()
  if not now.usable then
    return needs_epoch(now)
  end
  if not hand_over(now) then
    local lease = {id = id, ticket = ticket, delay = delay, since = ARGV[5], owner = owner}
    take_token(lease, now)
    put(lease, ttl)
    return granted(lease, now)
  end
  held = current()
end

if held.id == id and held.holds then
  -- The request is repeated, or confirms a lease that was granted from the queue.
  local now = counter()
  if not counts(held, now) then
    if not now.usable then
      return needs_epoch(now)
    end
    take_token(held, now)
  end
  redis.call('HDEL', WAITERS, UNCONFIRMED, id)
  -- If more than one request uses the id, the cancellation of one of them does not release the
  -- lease.
  held.ticket = held.ticket == ticket and ticket or '*'
  held.delay = delay
  -- The lease keeps the owner that was named first.
  if held.owner == '' then
    held.owner = owner
  end
  local ms = put(held, ttl)
  if redis.call('EXISTS', QUEUE) == 1 then
    publish_end(ms)
  end
  return granted(held, now)
end

local left = left_of(held)
if mode ~= 'waits' then
  if mode == 'leaves' and waiter(id) == ticket then
    leave(id)
  end
  return {'held', left}
end
local wait, channel, was_queued = tonumber(ARGV[12]), ARGV[13], ARGV[14] == '1'
local known_ticket, _, known_owner = waiter(id)
if known_ticket and was_queued and known_ticket ~= ticket then
  return {'displaced'}
end
-- Redis may have evicted one of the two keys, so each step adds the id if it is missing.
local last = redis.call('ZRANGE', QUEUE, -1, -1, 'WITHSCORES')[2]
local joined = redis.call('ZADD', QUEUE, 'NX', (last or 0) + 1, id)
if known_owner and known_owner ~= '' then
  owner = known_owner
end
redis.call('HSET', WAITERS, id, table.concat({ticket, channel, owner}, '\n'))
-- The queue expires if none of the issuers with waiters in it is still running.
if math.min(redis.call('PTTL', QUEUE), redis.call('PTTL', WAITERS)) < wait + 10000 then
  redis.call('PEXPIRE', QUEUE, wait + 30000)
  redis.call('PEXPIRE', WAITERS, wait + 30000)
end
return {'queued', left, joined}
