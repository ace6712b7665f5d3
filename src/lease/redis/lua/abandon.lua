-- Leaves the queue, and releases what was granted there; unless another request has asked
-- under the same id.
-- ARGV: …, lease id, ticket of the request. Answers as release does.
local id, ticket = ARGV[6], ARGV[7]
if waiter(id) == ticket then
  leave(id)
end
local held = current()
if not held or held.id ~= id or held.ticket ~= ticket or not held.holds then
  return {'lost'}
end
return end_lease()
