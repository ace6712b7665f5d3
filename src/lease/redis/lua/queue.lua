-- What the scripts of a lease share besides the counter: the lease of a resource, and the queue of the
-- requests that wait for it.
--
-- What is called a lease id here, and in the arguments, is a part of its digest: see stored_id.rs.

-- How long a request may take to confirm the lease that was handed to it.
local CONFIRM_MS = 1000
-- Under which name the channel of its issuer is noted meanwhile, among the waiters. No lease id is empty.
local UNCONFIRMED = ''

-- The lease in a value, or nil. The ticket is that of the request that asked under the lease's id, or `*` if
-- more than one did. `counted` is how far the counter had counted when the token was taken, `since` when the
-- lease was granted, by the clock of an issuer.
--
-- The key outlives the lease by its lock delay: `holds` tells whether the holder still has it, and `left`
-- for how many ms the resource stays blocked; nil if nobody had to ask.
local function parse(value)
  if not value then
    return nil
  end
  local pattern = '^(%d+):(%d+):([^:]*):([^:]*):(%d+):(%d+):(.*)$'
  local token, counted, id, ticket, delay, since, owner = string.match(value, pattern)
  delay = tonumber(delay or 0)
  local left = delay > 0 and redis.call('PTTL', LEASE)
  return {
    token = tonumber(token), counted = tonumber(counted), id = id, ticket = ticket, delay = delay,
    since = since, owner = owner, left = left or nil, holds = delay == 0 or left >= delay,
  }
end

local function current()
  return parse(redis.call('GET', LEASE))
end

-- For how many ms the resource stays blocked, if nothing happens.
local function left_of(lease)
  return lease.left or redis.call('PTTL', LEASE)
end

-- Whether a lease is one that this counter has granted, and not one that came back from the past: its
-- token may be outranked then.
local function counts(lease, now)
  return now.counts and lease.counted and lease.counted >= now.epoch * SIZE and lease.counted <= now.last
end

-- Gives a lease the next token of a usable counter.
local function take_token(lease, now)
  now.last = now.last + 1
  redis.call('HSET', COUNTER, 'n', now.last - now.epoch * SIZE)
  lease.token, lease.counted = now.last, now.last
end

-- Tells the issuers that have waiters in this partition how long the resource stays blocked.
local function publish_end(ms)
  -- Channels do not know databases.
  local everybody = string.gsub(COUNTER, 'clock$', DATABASE .. ':everybody')
  redis.call(PUBLISH, everybody, digits(ms) .. ' ' .. LEASE)
end

-- Stores a lease, and returns for how many ms the resource is blocked.
local function put(lease, ttl)
  local value = string.format('%.0f:%.0f:%s:%s:%.0f:%s:%s', lease.token, lease.counted, lease.id,
    lease.ticket, lease.delay, lease.since, lease.owner)
  local ms = ttl + lease.delay
  redis.call('SET', LEASE, value, 'PX', ms)
  return ms
end

-- The answer of a grant: its token, and how far the counter has counted.
local function granted(lease, now)
  return {'granted', lease.token, now.last}
end

-- What is noted of the waiter under an id: the ticket of the request that asked last, the channel of its
-- issuer, and the owner.
local function waiter(id)
  return string.match(redis.call('HGET', WAITERS, id) or '', '^([^\n]*)\n([^\n]*)\n(.*)$')
end

local function leave(id)
  redis.call('ZREM', QUEUE, id)
  redis.call('HDEL', WAITERS, id)
end

-- Grants a free lease to the first in the queue whose issuer still listens. Returns false if nobody waits.
--
-- It is granted for a moment only: the waiter confirms it, by asking again. If that moment went by
-- unconfirmed, the issuer hears but does not answer, and all its waiters are passed over; it is told,
-- so that they ask again once it answers again. `was_held` says that the lease before was not
-- one of these.
local function hand_over(now, was_held)
  local lapsed = not was_held and redis.call('HGET', WAITERS, UNCONFIRMED)
  if lapsed then
    redis.call('HDEL', WAITERS, UNCONFIRMED)
    redis.call(PUBLISH, lapsed, '* ' .. LEASE)
  end
  while true do
    local id = redis.call('ZPOPMIN', QUEUE)[1]
    if not id then
      return false
    end
    local ticket, channel, owner = waiter(id)
    redis.call('HDEL', WAITERS, id)
    if channel and channel ~= lapsed and redis.call(PUBLISH, channel, ticket .. ' ' .. LEASE) > 0 then
      redis.call('HSET', WAITERS, UNCONFIRMED, channel)
      local lease = {id = id, ticket = ticket, delay = 0, since = ARGV[5], owner = owner}
      take_token(lease, now)
      publish_end(put(lease, CONFIRM_MS))
      return true
    end
  end
end

-- Ends the lease; then the next in the queue has it. If that needs an epoch first, the issuers that have
-- waiters ask, and one of them begins it.
local function end_lease()
  local now = counter()
  if now.usable and hand_over(now, true) then
    return {'released'}
  end
  redis.call('DEL', LEASE)
  redis.call('HDEL', WAITERS, UNCONFIRMED)
  if not now.usable then
    publish_end(0)
  end
  return {'released'}
end
