-- Renews a lease if it has this token, and if the token was stored under the current replication id
-- of this node. A missing key stays missing. If this node lags and has a lower token that the same
-- attempt has sealed, the script stores the given token.
-- ARGV: …, number and ticket of the attempt, ttl in ms, the token.
-- Returns {'renewed', token, usable, epoch, n}, {'lost'}, or the reply of `unfit`.
local now = counter()
local refusal = unfit(now)
if refusal then
  return refusal
end
local lease, token = current(LEASE), ARGV[9]
if not lease or lease.id ~= ID or not lease.holds or lease.history ~= now.history then
  return {'lost'}
end
if lease.token ~= token then
  local lags = lease.mark == '1' and is_attempt(lease, ARGV[6], ARGV[7])
    and tonumber(lease.token) < tonumber(token)
    and now.usable and lease.incarnation == now.incarnation
    -- If a renewal has requested a lowest token, the token may be in another epoch, and was never
    -- counted.
    and math.floor(tonumber(token) / SIZE) == now.epoch
  if not lags then
    return {'lost'}
  end
  lease.token = token
  redis.call('SET', LEASE, value_of(lease), 'KEEPTTL')
  -- A token with the mark equals the count with which it was sealed, or was requested in this
  -- epoch, so raise the counter to it.
  raise(now, math.floor(tonumber(token) / SIZE), tonumber(token) % SIZE)
end
redis.call('PEXPIRE', LEASE, digits(tonumber(ARGV[8]) + lease.delay))
return {'renewed', token, counted(now)}
