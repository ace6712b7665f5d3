-- The short way, which most grants take: nobody has it, and nobody waits. What acquire.lua would do,
-- in fewer steps.
if redis.call('EXISTS', LEASE, QUEUE, WAITERS) == 0 then
  local now = clock()
  if not now.usable then
    return needs_epoch(now)
  end
  local token = next_token(now)
  local value = table.concat({token, ARGV[3], ARGV[4], ARGV[6], ARGV[7]}, ':')
  redis.call('SET', LEASE, value, 'PX', string.format('%.0f', ARGV[5] + ARGV[6]))
  return {'granted', token}
end
