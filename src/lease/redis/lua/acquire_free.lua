-- The short way, which most grants take: the lease is free, and there is no waiter. What acquire.lua would do,
-- in fewer steps.
if redis.call('EXISTS', LEASE, QUEUE, WAITERS) == 0 then
  local now = clock()
  if not now.usable then
    return needs_epoch(now)
  end
  local answer = granted(next_token(now), now)
  local value = table.concat({answer[2], answer[3], answer[4], ARGV[9], ARGV[10], ARGV[12], ARGV[13]}, ':')
  redis.call('SET', LEASE, value, 'PX', digits(ARGV[11] + ARGV[12]))
  return answer
end
