-- What most releases need: the lease has no lock delay, and no request waits. It does what release.lua would do,
-- ahead of everything that only the others need.
local value = redis.call('GET', KEYS[2])
if value and redis.call('EXISTS', KEYS[3], KEYS[4]) == 0 then
  local id, delay = string.match(value, '^%d+:%d+:([^:]*):[^:]*:(%d+):')
  if id == ARGV[6] and delay == '0' then
    redis.call('DEL', KEYS[2])
    return {'released'}
  end
end
