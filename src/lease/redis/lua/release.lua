-- Ends a lease that is held under this id; then the next in the queue has it.
-- ARGV: …, lease id. Answers {'released'} or {'lost'}.
local held = parse(value)
if not held or held.id ~= ARGV[6] or not held.holds then
  return {'lost'}
end
return end_lease()
