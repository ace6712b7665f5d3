-- The short way, which most releases take: without a lock delay, and there is no waiter. What release.lua
-- would do, in fewer steps.
local id, delay = string.match(redis.call('GET', LEASE) or '', '^%d+:%d+:%d+:([^:]*):[^:]*:(%d+):')
if id == ARGV[9] and delay == '0' and redis.call('EXISTS', QUEUE, WAITERS) == 0 then
  redis.call('DEL', LEASE)
  return {'released'}
end
