-- Stores the token of a grant, and has the clock count as far, if the key is the very one that was taken, and
-- the clock the very one that was answered. To run it again changes nothing.
-- ARGV: …, number and nonce of the attempt; history, incarnation and serial of the stamp; the token; epoch and n
-- that it was counted by.
-- Answers {'sealed'} or {'refused'}.
local lease, now = current(), clock()
local is_taken = lease and lease.id == ID and lease.holds and is_attempt(lease, ARGV[5], ARGV[6])
  and lease.history == ARGV[7] and lease.incarnation == ARGV[8] and lease.serial == ARGV[9]
if not is_taken or not now.own or now.history ~= ARGV[7] or now.incarnation ~= ARGV[8] then
  return {'refused'}
end
local epoch, n = tonumber(ARGV[11]), tonumber(ARGV[12])
if not now.n and epoch <= now.epoch then
  -- The source of epochs has gone back.
  return {'refused'}
end
-- Another resource of the partition may have counted further.
if not now.n or epoch > now.epoch or (epoch == now.epoch and n > now.n) then
  redis.call('HSET', CLOCK, 'epoch', ARGV[11], 'n', ARGV[12])
end
lease.token = ARGV[10]
redis.call('SET', LEASE, value_of(lease), 'KEEPTTL')
return {'sealed'}
