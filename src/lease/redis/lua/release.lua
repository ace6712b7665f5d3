-- Ends a lease that is held under this id; then the next in line has it.
-- ARGV: …, lease id. Answers {'released'} or {'lost'}.
local held = current()
if not held or held.id ~= ARGV[9] or not held.holds then
  return {'lost'}
end
leave(ARGV[9])
return end_lease()
