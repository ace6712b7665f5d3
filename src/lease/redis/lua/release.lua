-- Ends a lease that is held under this id, or leaves the line; then the next in line has it.
-- ARGV: …, lease id. Answers {'released'}, {'lost'}, or {'epoch', history, epoch}: released, but
-- the next in line needs an epoch first.
leave(ARGV[3])
local held = current()
if not held or held.id ~= ARGV[3] or not held.holds then
  return {'lost'}
end
redis.call('DEL', LEASE)
return pass_on() or {'released'}
