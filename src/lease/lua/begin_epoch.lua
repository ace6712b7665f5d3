-- Begins an epoch where the clock still needs one.
-- KEYS: clock. ARGV: the history that was seen, epoch, how many tokens an epoch has.
-- Answers 1, or 0 where another issuer was faster or the history has changed again.
local history = string.match(redis.call('INFO', 'replication'), 'master_replid:(%x+)')
local clock = redis.call('HMGET', KEYS[1], 'history', 'epoch', 'n')
local epoch, n = tonumber(clock[2] or ''), tonumber(clock[3] or '')
local needed = clock[1] ~= history or not epoch or not n or n + 1 >= tonumber(ARGV[3])
if history == ARGV[1] and needed and tonumber(ARGV[2]) > (epoch or 0) then
  redis.call('HSET', KEYS[1], 'history', history, 'epoch', ARGV[2], 'n', '0')
  return 1
end
return 0
