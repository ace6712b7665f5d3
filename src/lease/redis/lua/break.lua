-- Breaks the lease of the resource, or only one with this token. The first waiter is then granted
-- it.
-- ARGV: …, a token or ''. Answers {'released'}, or {'lost'} if there was no such lease.
local held = current()
if not held or (ARGV[6] ~= '' and held.token ~= tonumber(ARGV[6])) then
  return {'lost'}
end
return end_lease()
