-- Deletes the lease that was granted to this attempt with this token. If this node lags, also
-- deletes a key with a lower token, and a key without a token that no newer attempt has taken. If
-- the attempt itself has sealed the token of the key, also deletes a key with a higher token, which
-- was not granted.
-- ARGV: …, number and ticket of the attempt, the token.
-- Returns {'ended'} or {'none'}.
local lease = current(LEASE)
if not lease or lease.id ~= ID or not lease.holds then
  return {'none'}
end
local is_one
if lease.token == '' then
  is_one = not is_newer(lease, ARGV[6], ARGV[7])
else
  is_one = tonumber(lease.token) <= tonumber(ARGV[8])
    or (lease.mark == '1' and is_attempt(lease, ARGV[6], ARGV[7]))
end
if not is_one then
  return {'none'}
end
redis.call('DEL', LEASE)
return {'ended'}
