-- Makes a lease last longer, if it is held under this id.
-- KEYS: lease. ARGV: lease id, ttl in ms. Answers its token, or nil.
local held = redis.call('GET', KEYS[1])
local token, id = string.match(held or '', '^(%d+):([^:]*):')
if id ~= ARGV[1] then
  return false
end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return token
