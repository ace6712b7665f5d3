-- Takes the key of a lease that is held with this token, for one attempt at a new token. The key
-- keeps its token until the new one is sealed.
-- ARGV: …, number and ticket of the attempt, ttl in ms, the token.
-- Returns 'taken' and the words that follow it, as take.lua does, {'older', number}, {'lost'}, or
-- the reply of `unfit`.
local number, ticket = ARGV[6], ARGV[7]
local now = counter()
local refusal = unfit(now)
if refusal then
  return refusal
end
local lease = current(LEASE)
if not lease or lease.id ~= ID or not lease.holds or lease.history ~= now.history then
  return {'lost'}
end
if is_newer(lease, number, ticket) then
  return {'older', lease.number}
end
if lease.token ~= ARGV[9] then
  return {'lost'}
end
own(now)
if not is_attempt(lease, number, ticket) then
  local serial = redis.call('HINCRBY', COUNTER, 'serial', 1)
  lease.history, lease.incarnation, lease.serial = now.history, now.incarnation, digits(serial)
  lease.number, lease.ticket, lease.mark = number, ticket, '0'
end
redis.call('SET', LEASE, value_of(lease), 'PX', digits(tonumber(ARGV[8]) + lease.delay))
return taken_reply('taken', lease, now)
