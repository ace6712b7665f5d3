-- Removes a request from the queue, and releases the lease that was granted to it, unless another
-- request has used the same lease id since.
-- ARGV: …, lease id, ticket of the request.
-- Returns the same replies as release.lua.
local id, ticket = ARGV[6], ARGV[7]
if waiter(id) == ticket then
  leave(id)
end
local held = current()
if not held or held.id ~= id or held.ticket ~= ticket or not held.holds then
  return {'lost'}
end
return end_lease()
