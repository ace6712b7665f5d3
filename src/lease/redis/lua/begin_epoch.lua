-- Begins an epoch on the very clock that needed one.
-- ARGV: …, the history and the incarnation that were answered, epoch.
-- Answers 1, or 0 where another issuer was faster, or the clock is another one by now.
local now, epoch = clock(), tonumber(ARGV[11])
if not now.own or now.usable or now.history ~= ARGV[9] or now.incarnation ~= ARGV[10]
  or epoch <= math.max(now.epoch, SEEN_EPOCH) then
  return 0
end
redis.call('HSET', CLOCK, 'epoch', ARGV[11], 'n', '0')
return 1
