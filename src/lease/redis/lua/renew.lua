-- Starts the time of a lease anew, if it is held under this id.
-- ARGV: …, lease id, ttl in ms, 1 for a new token, the lowest token it may have.
-- Answers {'granted', …}, {'lost'}, {'exhausted', token} where there is none above that one, or what
-- needs_epoch does.
local held = current()
if not held or held.id ~= ARGV[9] or not held.holds then
  return {'lost'}
end
local now = clock()
if now.behind and not REPLACES_CLOCK then
  return needs_epoch(now)
end
if not counts(held, now) then
  return {'lost'}
end
local token, ttl, lowest = tonumber(held.token), tonumber(ARGV[10]), tonumber(ARGV[12])
if ARGV[11] == '1' then
  lowest = math.max(lowest, token + 1)
end
if token < lowest then
  if lowest >= SIZE * 1000000 then
    return {'exhausted', held.token}
  end
  if not now.usable then
    return needs_epoch(now)
  end
  take_token(held, now)
  -- The clock does not follow: where the resource has seen a token from elsewhere, this concerns
  -- this lease alone.
  held.token = digits(math.max(lowest, tonumber(held.token)))
  put(held, ttl)
else
  -- The value stays. A full server takes this, and no SET.
  local ms = digits(ttl + held.delay)
  redis.call('PEXPIRE', LEASE, ms)
  publish_end(ms)
end
return granted(held.token, now)
