-- Ends a lease that is held under this id; then the next in line has it.
-- ARGV: …, lease id. Answers {'released'}, {'lost'}, or {'epoch', history, epoch}: released, but
-- the next in line needs an epoch first.
local held = current()
if not held or held.id ~= ARGV[3] or not held.holds then
  return {'lost'}
end
leave(ARGV[3])
return end_lease()
