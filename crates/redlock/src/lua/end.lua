-- Ends the very lease that was found.
-- ARGV: …, its value.
-- Answers {'ended'} or {'none'}.
if redis.call('GET', LEASE) ~= ARGV[6] then
  return {'none'}
end
redis.call('DEL', LEASE)
return {'ended'}
