-- What all scripts share beside the clock: the lease of a resource, and the line of those who wait
-- for it.

-- How long a waiter may take to claim the lease that was granted to it.
local CLAIM_MS = 1000
-- Where the channel of its issuer is noted meanwhile, among the waiters. No lease id is empty.
local CLAIM = ''

-- The lease as it stands, or nil. The key outlives the lease by its lock delay: `holds` tells
-- whether the holder still has it, `left` how long the resource stays closed. The ticket is that
-- of the request that asked under the lease's id, or `*` where more than one did.
local function current()
  local value = redis.call('GET', LEASE)
  if not value then
    return nil
  end
  local pattern = '^(%d+):([^:]*):([^:]*):(%d+):(.*)$'
  local token, id, ticket, delay, owner = string.match(value, pattern)
  local left = redis.call('PTTL', LEASE)
  delay = tonumber(delay or 0)
  return {
    token = token, id = id, ticket = ticket, delay = delay, owner = owner,
    left = left, holds = left >= delay,
  }
end

-- Tells the issuers that have waiters in this partition how long the resource stays closed.
local function announce(left)
  if redis.call('EXISTS', QUEUE) == 1 then
    local everybody = string.gsub(CLOCK, 'clock$', 'everybody')
    redis.call(PUBLISH, everybody, left .. ' ' .. LEASE)
  end
end

local function put(token, id, ticket, delay, owner, ttl)
  local value = table.concat({token, id, ticket, string.format('%.0f', delay), owner}, ':')
  local ms = string.format('%.0f', ttl + delay)
  redis.call('SET', LEASE, value, 'PX', ms)
  announce(ms)
end

-- Who waits under an id: the ticket of the request that asked last, the channel of its issuer, and
-- the owner.
local function waiter(id)
  return string.match(redis.call('HGET', WAITERS, id) or '', '^([^\n]*)\n([^\n]*)\n(.*)$')
end

-- A line whose issuers have all died disappears by itself.
local function keep(key, ms)
  if redis.call('PTTL', key) < ms then
    redis.call('PEXPIRE', key, string.format('%.0f', ms))
  end
end

local function leave(id)
  redis.call('ZREM', QUEUE, id)
  redis.call('HDEL', WAITERS, id)
end

-- Grants a free lease to the first in line whose issuer still listens, and returns its id. It is
-- granted for a moment only: the waiter claims it, by asking again. Where that moment went by
-- unclaimed, the issuer hears but does not answer, and all its waiters are passed over; it is told,
-- so that they ask again once it answers again.
local function hand_over(now)
  local lapsed = redis.call('HGET', WAITERS, CLAIM)
  if lapsed then
    redis.call('HDEL', WAITERS, CLAIM)
    redis.call(PUBLISH, lapsed, '* ' .. LEASE)
  end
  while true do
    local id = redis.call('ZRANGE', QUEUE, 0, 0)[1]
    if not id then
      return nil
    end
    local ticket, channel, owner = waiter(id)
    leave(id)
    if channel and channel ~= lapsed and redis.call(PUBLISH, channel, id .. ' ' .. LEASE) > 0 then
      redis.call('HSET', WAITERS, CLAIM, channel)
      keep(WAITERS, 60000)
      put(next_token(now), id, ticket, 0, owner, CLAIM_MS)
      return id
    end
  end
end

-- Hands a free lease over, if anybody waits. Answers nil, or that it needs an epoch first.
local function pass_on()
  if redis.call('EXISTS', QUEUE) == 1 then
    local now = clock()
    if not now.usable then
      return needs_epoch(now)
    end
    hand_over(now)
  end
  return nil
end

-- Ends the lease, which somebody answers for; then the next in line has it.
local function end_lease()
  redis.call('DEL', LEASE)
  redis.call('HDEL', WAITERS, CLAIM)
  return pass_on() or {'released'}
end
