-- Grants a lease, or joins the line, or says what is in the way.
-- ARGV: …, lease id, ticket of the request, ttl in ms, lock delay in ms, owner, wait in ms (0: do not
-- wait), own channel.
-- Answers {'granted', token}, {'held', ms left}, {'queued', ms left}, or {'epoch', history, epoch}.
local id, ticket, owner = ARGV[3], ARGV[4], ARGV[7]
local ttl, delay, wait = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[8])

local held = current()
if not held then
  local now = clock()
  if not now.usable then
    return needs_epoch(now)
  end
  if not hand_over(now) then
    -- Nobody was before us.
    local token = next_token(now)
    put(token, id, ticket, delay, owner, ttl)
    return {'granted', token}
  end
  held = current()
end

if held.id == id and held.holds then
  -- A repeated request, or the claim of what was granted in line.
  leave(id)
  redis.call('HDEL', WAITERS, CLAIM)
  -- Where more than one request asks under the id, the end of none of them gives the lease back.
  put(held.token, id, held.ticket == ticket and ticket or '*', delay, owner, ttl)
  return {'granted', held.token}
end

local left = string.format('%.0f', held.left)
if wait == 0 then
  if waiter(id) == ticket then
    leave(id)
  end
  return {'held', left}
end
if not redis.call('ZSCORE', QUEUE, id) then
  local last = redis.call('ZRANGE', QUEUE, -1, -1, 'WITHSCORES')[2]
  redis.call('ZADD', QUEUE, string.format('%.0f', tonumber(last or 0) + 1), id)
end
redis.call('HSET', WAITERS, id, table.concat({ticket, ARGV[9], owner}, '\n'))
keep(QUEUE, wait + 10000)
keep(WAITERS, wait + 10000)
return {'queued', left}
