-- Deletes the lease that was read, if its value has not changed.
-- ARGV: …, the value.
-- Returns {'ended'} or {'none'}.
if redis.call('GET', LEASE) ~= ARGV[6] then
  return {'none'}
end
redis.call('DEL', LEASE)
return {'ended'}
