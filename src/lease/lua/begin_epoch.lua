-- Begins an epoch where the clock still needs one.
-- KEYS: clock. ARGV: the history that was seen, epoch, how many tokens an epoch has.
local history = string.match(redis.call('INFO', 'replication'), 'master_replid:(%x+)')
local clock = redis.call('HMGET', KEYS[1], 'history', 'epoch', 'n')
local epoch, n = tonumber(clock[2] or 0), tonumber(clock[3] or 0) + 1
local needed = clock[1] ~= history or n >= tonumber(ARGV[3])
if history == ARGV[1] and needed and tonumber(ARGV[2]) > epoch then
  redis.call('HSET', KEYS[1], 'history', history, 'epoch', ARGV[2], 'n', '0')
  return 1
end
return 0
