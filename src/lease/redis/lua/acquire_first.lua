-- The common case: the resource is free, and no request waits. This part has the same effect as
-- acquire.lua, and runs before the parts that only other cases need. The incarnation of the counter
-- is not checked, because every counter with tokens has one.
-- Returns only the token, because a reply of several parts takes longer.
if redis.call('EXISTS', KEYS[2], KEYS[3], KEYS[4]) == 0 and ARGV[1] ~= '' then
  local found = redis.call('HMGET', KEYS[1], 'source', 'history', 'epoch', 'n')
  local epoch, n = tonumber(found[3] or ''), tonumber(found[4] or '')
  local info = redis.call('INFO', 'replication')
  if epoch and n and n + 1 < SIZE and found[1] == ARGV[1] and found[2]
    and epoch * SIZE + n >= tonumber(ARGV[3])
    and string.find(info, 'role:master', 1, true)
    and string.find(info, 'master_replid:' .. found[2] .. '\r', 1, true)
  then
    redis.call('HINCRBY', KEYS[1], 'n', '1')
    local token = string.format('%d%09d', epoch, n + 1)
    local value = token .. ':' .. token .. ':' .. ARGV[6] .. ':' .. ARGV[7]
      .. ':' .. ARGV[9] .. ':' .. ARGV[5] .. ':' .. ARGV[10]
    redis.call('SET', KEYS[2], value, 'PX', ARGV[8])
    return token
  end
end
