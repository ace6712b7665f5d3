-- Looks whether the lease has ended by itself; then the next in line has it.
-- ARGV: …, the id of a waiter of the asking issuer.
-- Answers {'held', ms left, 1 where that waiter is in line}, {'free'}, or what needs_epoch does.
if redis.call('EXISTS', LEASE) == 0 then
  local epoch = pass_on()
  if epoch then
    return epoch
  end
end
local held = current()
if not held then
  return {'free'}
end
return {'held', digits(held.left), tostring(redis.call('HEXISTS', WAITERS, ARGV[9]))}
