-- Deletes the key that a request has left, if the key has no token, or a token that the request
-- itself has sealed when the key had none. The key of a newer attempt of the request stays, because
-- this run may be a late copy of the script.
-- ARGV: …, ticket of the request, number of its newest attempt that has failed.
-- Returns {'ended'} or {'none'}.
local lease = current(LEASE)
if not lease or lease.id ~= ID or lease.ticket ~= ARGV[6] or tonumber(lease.number) > tonumber(ARGV[7])
  or (lease.token ~= '' and lease.mark ~= '1') then
  return {'none'}
end
redis.call('DEL', LEASE)
return {'ended'}
