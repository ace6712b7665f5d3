-- Releases a lease that is held under this id. Then grants a lease to the first waiter. If a
-- request waits under this id instead, notifies its issuer with a `-` before the ticket. If the
-- client of that request has disconnected, the issuer abandons the request.
-- ARGV: …, lease id.
-- Returns {'released'} or {'lost'}.

-- release_first.lua has read `value`.
local held = parse(value)
if not held or held.id ~= ARGV[6] or not held.holds then
  local ticket, channel = waiter(ARGV[6])
  if ticket then
    redis.call(PUBLISH, channel, '-' .. ticket .. ' ' .. LEASE)
  end
  return {'lost'}
end
return end_lease()
