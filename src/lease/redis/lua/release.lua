-- Releases a lease that is held under this id. Then grants a lease to the first waiter.
-- ARGV: …, lease id.
-- Returns {'released'} or {'lost'}.
local held = parse(value)
if not held or held.id ~= ARGV[6] or not held.holds then
  return {'lost'}
end
return end_lease()
