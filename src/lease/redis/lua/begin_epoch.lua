-- Begins an epoch where the clock still needs one.
-- ARGV: …, the history that was seen, epoch.
-- Answers 1, or 0 where another issuer was faster or the history has changed again.
local now = clock()
if now.usable or now.history ~= ARGV[3] or tonumber(ARGV[4]) <= now.epoch then
  return 0
end
redis.call('HSET', CLOCK, 'history', now.history, 'epoch', ARGV[4], 'n', '0')
return 1
