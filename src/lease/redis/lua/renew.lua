-- Renews a lease that is held under this id.
-- ARGV: …, lease id, ttl in ms, 1 for a new token, the lowest token that the lease may have.
-- Returns {'granted', …}, {'lost'}, {'exhausted', token} if no token is left above `token`, or the
-- reply of `needs_epoch`.
local now = counter()
if not now.is_master or now.behind and not REPLACES then
  return needs_epoch(now)
end
local held = current()
if not held or held.id ~= ARGV[6] or not held.holds then
  return {'lost'}
end
if not counts(held, now) then
  return {'lost'}
end
local ttl, lowest, ms = tonumber(ARGV[7]), tonumber(ARGV[9]), nil
if ARGV[8] == '1' then
  lowest = math.max(lowest, held.token + 1)
end
if held.token < lowest then
  if lowest >= SIZE * 1000000 then
    return {'exhausted', held.token}
  end
  if not now.usable then
    return needs_epoch(now)
  end
  take_token(held, now)
  -- If the lowest token is above the counter, the counter is not raised, because that token
  -- concerns only this lease.
  held.token = math.max(lowest, held.token)
  ms = put(held, ttl)
else
  -- The value does not change, so PEXPIRE is enough. Unlike SET, it also works on a server without
  -- free memory.
  ms = ttl + held.delay
  redis.call('PEXPIRE', LEASE, ms)
end
if redis.call('EXISTS', QUEUE) == 1 then
  publish_end(ms)
end
return granted(held, now)
