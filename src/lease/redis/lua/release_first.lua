-- The common case: the lease has no lock delay, and no request waits. This part has the same effect
-- as release.lua, and runs before the parts that only other cases need.
local value = redis.call('GET', KEYS[2])
if value and redis.call('EXISTS', KEYS[3], KEYS[4]) == 0 then
  local id, delay = string.match(value, '^%d+:%d+:([^:]*):[^:]*:(%d+):')
  if id == ARGV[6] and delay == '0' then
    redis.call('DEL', KEYS[2])
    return 'released'
  end
end
