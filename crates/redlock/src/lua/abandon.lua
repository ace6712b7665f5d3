-- Deletes the key that a request has left: one without a token, or with a token that the request
-- itself has sealed when the key had none. A key of a newer attempt of the request stays: this may
-- be a late copy.
-- ARGV: …, ticket of the request, number of its newest attempt that has failed.
-- Answers {'ended'} or {'none'}.
local lease = current(LEASE)
if not lease or lease.id ~= ID or lease.ticket ~= ARGV[6] or tonumber(lease.number) > tonumber(ARGV[7])
  or (lease.token ~= '' and lease.mark ~= '1') then
  return {'none'}
end
redis.call('DEL', LEASE)
return {'ended'}
