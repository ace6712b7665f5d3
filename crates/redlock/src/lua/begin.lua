-- Begins an epoch on the counter that needed it, unless the counter has been replaced. If the
-- counter is usable but in a lower epoch, raises it to the given epoch.
-- ARGV: …, replication id and incarnation of the counter, epoch.
-- Returns {'begun'} or {'refused'}.
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
