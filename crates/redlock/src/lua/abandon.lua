-- Deletes the key of a request that has been abandoned. The key is deleted only if it has no token,
-- or if the request was the first to seal a token in it. The key of a newer attempt is kept,
-- because this run may be a delayed copy of the script.
-- ARGV: …, ticket of the request, number of its newest attempt that has failed.
-- Returns {'ended'} if the key was deleted, and {'none'} otherwise.
local lease = current(LEASE)
if not lease or lease.id ~= ID or lease.ticket ~= ARGV[6] or tonumber(lease.number) > tonumber(ARGV[7])
  or (lease.token ~= '' and lease.mark ~= '1') then
  return {'none'}
end
redis.call('DEL', LEASE)
return {'ended'}
