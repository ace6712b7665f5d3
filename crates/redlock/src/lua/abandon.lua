-- Deletes the key that a request has left: one without a token, or with a token that the request
-- itself has sealed when the key had none.
-- ARGV: …, ticket of the request.
-- Answers {'ended'} or {'none'}.
local lease = current(LEASE)
if not lease or lease.id ~= ID or lease.ticket ~= ARGV[6] or (lease.token ~= '' and lease.mark ~= '1') then
  return {'none'}
end
redis.call('DEL', LEASE)
return {'ended'}
