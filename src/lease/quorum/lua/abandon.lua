-- Takes back what an attempt has left: its key without a token, or with the token that it has stored here.
-- ARGV: …, number and nonce of the attempt, the token or ''.
-- Answers {'ended'} or {'none'}.
local lease = current()
if not lease or lease.id ~= ID or not is_attempt(lease, ARGV[5], ARGV[6])
  or (lease.token ~= '' and lease.token ~= ARGV[7]) then
  return {'none'}
end
redis.call('DEL', LEASE)
return {'ended'}
