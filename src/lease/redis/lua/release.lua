-- Releases a lease that is held under this id. The first waiter is then granted it.
-- ARGV: …, lease id. Answers {'released'} or {'lost'}.
local held = parse(value)
if not held or held.id ~= ARGV[6] or not held.holds then
  return {'lost'}
end
return end_lease()
