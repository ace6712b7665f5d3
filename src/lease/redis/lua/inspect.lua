-- Tells who holds a lease, and how many wait for it.
-- Answers {token, owner, ms left, how many wait}, or nil.
local held = current()
if not held or not held.holds or not counts(held, clock()) then
  return false
end
return {held.token, held.owner, digits(held.left - held.delay), tostring(redis.call('ZCARD', QUEUE))}
