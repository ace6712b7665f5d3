-- Grants a lease, or joins the line, or says what is in the way.
-- ARGV: …, lease id, ticket of the request, ttl in ms, lock delay in ms, owner, wait in ms (0: do not
-- wait), own channel, 1 where this request was put in line before.
-- Answers {'granted', …}, {'held', ms left}, {'queued', ms left, 1 where it was not in line before},
-- {'displaced'}, or what needs_epoch does.
local id, ticket, owner = ARGV[9], ARGV[10], ARGV[13]
local ttl, delay, wait = tonumber(ARGV[11]), tonumber(ARGV[12]), tonumber(ARGV[14])

local held = current()
if not held then
  local now = clock()
  if not now.usable then
    return needs_epoch(now)
  end
  if not hand_over(now) then
    -- There is no line.
    local lease = {id = id, ticket = ticket, delay = delay, owner = owner}
    take_token(lease, now)
    put(lease, ttl)
    return granted(lease.token, now)
  end
  held = current()
end

if held.id == id and held.holds then
  -- A repeated request, or the confirmation of what was granted in line.
  local now = clock()
  if not counts(held, now) then
    if not now.usable then
      return needs_epoch(now)
    end
    take_token(held, now)
  end
  leave(id)
  redis.call('HDEL', WAITERS, UNCONFIRMED)
  -- Where more than one request asks under the id, the end of none of them releases the lease.
  held.ticket = held.ticket == ticket and ticket or '*'
  held.delay = delay
  -- The owner stays the one that was named first.
  if held.owner == '' then
    held.owner = owner
  end
  put(held, ttl)
  return granted(held.token, now)
end

local left = digits(held.left)
if wait == 0 then
  if waiter(id) == ticket then
    leave(id)
  end
  return {'held', left}
end
local known_ticket, _, known_owner = waiter(id)
local joined = '0'
if not redis.call('ZSCORE', QUEUE, id) then
  local last = redis.call('ZRANGE', QUEUE, -1, -1, 'WITHSCORES')[2]
  redis.call('ZADD', QUEUE, digits(tonumber(last or 0) + 1), id)
  joined = '1'
elseif ARGV[16] == '1' and known_ticket and known_ticket ~= ticket then
  return {'displaced'}
end
if known_owner and known_owner ~= '' then
  owner = known_owner
end
redis.call('HSET', WAITERS, id, table.concat({ticket, ARGV[15], owner}, '\n'))
keep(QUEUE, wait + 10000)
keep(WAITERS, wait + 10000)
return {'queued', left, joined}
