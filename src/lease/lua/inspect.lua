-- Tells who holds a lease.
-- KEYS: lease. Answers {token, owner, ms left}, or nil.
local held = redis.call('GET', KEYS[1])
local token, owner = string.match(held or '', '^(%d+):[^:]*:(.*)$')
if not token then
  return false
end
return {token, owner, tostring(redis.call('PTTL', KEYS[1]))}
