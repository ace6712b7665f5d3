-- Starts the time of a lease anew, if it has a token under the history of this node. A key that is missing stays
-- missing.
-- ARGV: …, ttl in ms.
-- Answers {'renewed', token, usable, epoch, n}, {'lost'}, or what unfit does.
local now = clock()
local refusal = unfit(now)
if refusal then
  return refusal
end
local lease = current()
if not lease or lease.id ~= ID or not lease.holds or lease.token == '' or lease.history ~= now.history then
  return {'lost'}
end
redis.call('PEXPIRE', LEASE, digits(tonumber(ARGV[5]) + lease.delay))
return {'renewed', lease.token, counted(now)}
