-- Ends a lease, if it is held under this id.
-- KEYS: lease. ARGV: lease id. Answers 1 or 0.
local held = redis.call('GET', KEYS[1])
local _, id = string.match(held or '', '^(%d+):([^:]*):')
if id ~= ARGV[1] then
  return 0
end
return redis.call('DEL', KEYS[1])
