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
local epoch, n = tonumber(clock[2] or 0), tonumber(clock[3] or 0) + 1
if clock[1] ~= history or n >= tonumber(ARGV[4]) then
  return {'epoch', history, string.format('%.0f', epoch)}
end

-- tostring would round a number of 15 digits.
local token = string.format('%.0f', epoch * tonumber(ARGV[4]) + n)
redis.call('SET', KEYS[2], token .. ':' .. ARGV[1] .. ':' .. ARGV[3], 'NX', 'PX', ARGV[2])
redis.call('HSET', KEYS[1], 'n', string.format('%.0f', n))
return {'granted', token}
