-- Begins an epoch on the counter that `needs_epoch` has returned.
-- ARGV: …, the replication id and the incarnation of that counter, epoch.
-- Returns 1, or 0 if another issuer has begun an epoch first, the counter has been replaced or is
-- not below the epoch, or this server is a replica.
local now, epoch = counter(), tonumber(ARGV[8])
if not now.is_master or not now.own or now.usable or now.history ~= ARGV[6] or now.incarnation ~= ARGV[7]
  or epoch <= math.max(now.epoch, math.floor(SEEN / SIZE)) then
  return 0
end
redis.call('HSET', COUNTER, 'epoch', epoch, 'n', '0')
return 1
