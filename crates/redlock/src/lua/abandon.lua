-- Undoes what a request has left: its key without a token, or with one that the request itself has
-- sealed over no earlier one.
-- ARGV: …, ticket of the request.
-- Answers {'ended'} or {'none'}.
local lease = current(LEASE)
if not lease or lease.id ~= ID or lease.ticket ~= ARGV[6] or (lease.token ~= '' and lease.mark ~= '1') then
  return {'none'}
end
redis.call('DEL', LEASE)
return {'ended'}
