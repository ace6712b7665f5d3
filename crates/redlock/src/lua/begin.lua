-- Begins an epoch on the very counter that needed one, or that has counted in a lower one.
-- ARGV: …, history and incarnation of the counter, epoch.
-- Answers {'begun'} or {'refused'}.
local now, epoch = counter(), tonumber(ARGV[8])
if not now.own or now.history ~= ARGV[6] or now.incarnation ~= ARGV[7] then
  return {'refused'}
end
if now.usable and now.epoch == epoch then
  return {'begun'}
end
if epoch <= now.epoch then
  return {'refused'}
end
redis.call('HSET', COUNTER, 'epoch', ARGV[8], 'n', '0')
return {'begun'}
