-- Reads several leases, and the number of requests that wait for each.
-- KEYS: four for each lease. ARGV: …, and for each lease the highest token that the issuer has seen
-- its counter reach.
-- Returns for each lease {token, owner, ms left, number of waiters, time of the grant in seconds
-- since 1970}, or nil.
local found, counters = {}, {}
for i = 0, #KEYS / 4 - 1 do
  COUNTER, LEASE, QUEUE = KEYS[4 * i + 1], KEYS[4 * i + 2], KEYS[4 * i + 3]
  SEEN = tonumber(ARGV[6 + i])
  local held = current()
  if held and held.holds and not counters[COUNTER] then
    counters[COUNTER] = counter()
  end
  if held and held.holds and counts(held, counters[COUNTER]) then
    found[i + 1] = {held.token, held.owner, left_of(held) - held.delay, redis.call('ZCARD', QUEUE), held.since}
  else
    found[i + 1] = false
  end
end
return found
