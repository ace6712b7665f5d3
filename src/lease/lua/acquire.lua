-- Grants a lease, or says what is in the way.
-- KEYS: clock, lease. ARGV: lease id, ttl in ms, owner, how many tokens an epoch has.
-- Answers {'granted', token}, {'held', ms left}, or {'epoch', history, epoch}, which changes nothing.
local held = redis.call('GET', KEYS[2])
if held then
  local token, id = string.match(held, '^(%d+):([^:]*):')
  if id == ARGV[1] then
    redis.call('PEXPIRE', KEYS[2], ARGV[2])
    return {'granted', token}
  end
  return {'held', tostring(redis.call('PTTL', KEYS[2]))}
end

-- The history of this server: it changes at each restart and at each promotion.
local history = string.match(redis.call('INFO', 'replication'), 'master_replid:(%x+)')
if not history then
  return redis.error_reply('NOHISTORY this server does not tell its master_replid')
end
local clock = redis.call('HMGET', KEYS[1], 'history', 'epoch', 'n')
local epoch, n = tonumber(clock[2] or ''), tonumber(clock[3] or '')
local size = tonumber(ARGV[4])
if clock[1] ~= history or not epoch or not n or n + 1 >= size then
  return {'epoch', history, string.format('%.0f', epoch or 0)}
end

-- tostring would round a number of 15 digits.
local token = string.format('%.0f', epoch * size + n + 1)
redis.call('SET', KEYS[2], token .. ':' .. ARGV[1] .. ':' .. ARGV[3], 'NX', 'PX', ARGV[2])
redis.call('HINCRBY', KEYS[1], 'n', 1)
return {'granted', token}
