-- Breaks the lease on the resource. If a token is given, breaks the lease only if it has this
-- token. Then grants a lease to the first waiter.
-- ARGV: …, a token or ''.
-- Returns {'released'}, or {'lost'} if no lease was broken.
local held = current()
if not held or (ARGV[6] ~= '' and held.token ~= tonumber(ARGV[6])) then
  return {'lost'}
end
return end_lease()
