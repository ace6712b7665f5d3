-- Tells who holds each of several leases, and how many wait for it.
-- KEYS: …, and four for each. ARGV: …, and for each the highest epoch and number that the issuer has seen.
-- Answers what inspect.lua does, for each of them.
local found = {}
for i = 1, #KEYS / 4 - 1 do
  CLOCK, LEASE, QUEUE = KEYS[4 * i + 1], KEYS[4 * i + 2], KEYS[4 * i + 3]
  SEEN_EPOCH, SEEN_N = tonumber(ARGV[7 + 2 * i]), tonumber(ARGV[8 + 2 * i])
  local held = current()
  if held and held.holds and counts(held, clock()) then
    found[i] = {held.token, held.owner, digits(held.left - held.delay), tostring(redis.call('ZCARD', QUEUE))}
  else
    found[i] = false
  end
end
return found
