-- Grants a lease, or joins the line, or says what is in the way.
-- ARGV: …, lease id, ttl in ms, lock delay in ms, owner, wait in ms (0: do not wait), own channel.
-- Answers {'granted', token}, {'held', ms left}, {'queued', ms left}, or {'epoch', history, epoch}.
local id, ttl, delay, owner, wait = ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5]), ARGV[6], tonumber(ARGV[7])

local held = current()
if not held then
  local now = clock()
  if not now.usable then
    return needs_epoch(now)
  end
  if not hand_over(now) then
    -- Nobody was before us.
    local token = next_token(now)
    put(token, id, delay, owner, ttl)
    return {'granted', token}
  end
  held = current()
end

if held.id == id and held.holds then
  -- A repeated request, or the claim of what was granted in line.
  leave(id)
  put(held.token, id, delay, owner, ttl)
  return {'granted', held.token}
end

local left = string.format('%.0f', held.left)
if wait == 0 then
  leave(id)
  return {'held', left}
end
if not redis.call('ZSCORE', QUEUE, id) then
  local last = redis.call('ZRANGE', QUEUE, -1, -1, 'WITHSCORES')[2]
  redis.call('ZADD', QUEUE, string.format('%.0f', tonumber(last or 0) + 1), id)
end
redis.call('HSET', WAITERS, id, ARGV[8] .. '\n' .. owner)
-- A line whose issuers have all died disappears by itself.
for _, key in ipairs({QUEUE, WAITERS}) do
  if redis.call('PTTL', key) < wait + 10000 then
    redis.call('PEXPIRE', key, string.format('%.0f', wait + 10000))
  end
end
return {'queued', left}
