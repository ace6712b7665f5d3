-- Ends the lease that there is, or the one with this token, by force; then the next in the queue has it.
-- ARGV: …, a token or ''. Answers {'released'}, or {'lost'} if there was none.
local held = current()
if not held or (ARGV[6] ~= '' and held.token ~= tonumber(ARGV[6])) then
  return {'lost'}
end
return end_lease()
