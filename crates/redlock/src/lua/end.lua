-- Deletes a lease if its value is still the value that the issuer has read.
-- ARGV: …, the value.
-- Returns {'ended'} or {'none'}.
if redis.call('GET', LEASE) ~= ARGV[6] then
  return {'none'}
end
redis.call('DEL', LEASE)
return {'ended'}
