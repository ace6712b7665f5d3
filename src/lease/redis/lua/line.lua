-- What all scripts share beside the clock: the lease of a resource, and the line of its waiters.

-- How long a waiter may take to confirm the lease that was granted to it.
local CONFIRM_MS = 1000
-- Where the channel of its issuer is noted meanwhile, among the waiters. No lease id is empty.
local UNCONFIRMED = ''

-- What is called a lease id here, and in the arguments, is a part of its digest: see stored_id.rs.

-- The lease as it stands, or nil. The key outlives the lease by its lock delay: `holds` tells
-- whether the holder still has it, `left` how long the resource stays closed. The ticket is that
-- of the request that asked under the lease's id, or `*` where more than one did. `epoch` and `n` are
-- the stamp: how far the clock had counted when the token was taken.
local function current()
  local value = redis.call('GET', LEASE)
  if not value then
    return nil
  end
  local pattern = '^(%d+):(%d+):(%d+):([^:]*):([^:]*):(%d+):(.*)$'
  local token, epoch, n, id, ticket, delay, owner = string.match(value, pattern)
  local left = redis.call('PTTL', LEASE)
  delay = tonumber(delay or 0)
  return {
    token = token, epoch = tonumber(epoch or 0), n = tonumber(n or 0), id = id, ticket = ticket,
    delay = delay, owner = owner, left = left, holds = left >= delay,
  }
end

-- Whether a lease is one that this clock has granted, and not one that came back from the past: its
-- token may be outranked then.
local function counts(lease, now)
  return now.counts and lease.epoch == now.epoch and lease.n <= now.n
end

-- Gives a lease the next token of a usable clock.
local function take_token(lease, now)
  lease.token = next_token(now)
  lease.epoch, lease.n = now.epoch, now.n
end

-- Tells the issuers that have waiters in this partition how long the resource stays closed.
local function publish_end(left)
  if redis.call('EXISTS', QUEUE) == 1 then
    -- Channels do not know databases.
    local everybody = string.gsub(CLOCK, 'clock$', DATABASE .. ':everybody')
    redis.call(PUBLISH, everybody, left .. ' ' .. LEASE)
  end
end

local function put(lease, ttl)
  local value = table.concat({
    lease.token, digits(lease.epoch), digits(lease.n), lease.id, lease.ticket,
    digits(lease.delay), lease.owner,
  }, ':')
  local ms = digits(ttl + lease.delay)
  redis.call('SET', LEASE, value, 'PX', ms)
  publish_end(ms)
end

-- What is noted of the waiter under an id: the ticket of the request that asked last, the channel of its issuer, and
-- the owner.
local function waiter(id)
  return string.match(redis.call('HGET', WAITERS, id) or '', '^([^\n]*)\n([^\n]*)\n(.*)$')
end

-- A line whose issuers have all died disappears by itself.
local function keep(key, ms)
  if redis.call('PTTL', key) < ms then
    redis.call('PEXPIRE', key, digits(ms))
  end
end

local function leave(id)
  redis.call('ZREM', QUEUE, id)
  redis.call('HDEL', WAITERS, id)
end

-- Grants a free lease to the first in line whose issuer still listens, and returns its id. It is
-- granted for a moment only: the waiter confirms it, by asking again. Where that moment went by
-- unconfirmed, the issuer hears but does not answer, and all its waiters are passed over; it is told,
-- so that they ask again once it answers again.
local function hand_over(now)
  local lapsed = redis.call('HGET', WAITERS, UNCONFIRMED)
  if lapsed then
    redis.call('HDEL', WAITERS, UNCONFIRMED)
    redis.call(PUBLISH, lapsed, '* ' .. LEASE)
  end
  while true do
    local id = redis.call('ZRANGE', QUEUE, 0, 0)[1]
    if not id then
      return nil
    end
    local ticket, channel, owner = waiter(id)
    leave(id)
    if channel and channel ~= lapsed and redis.call(PUBLISH, channel, ticket .. ' ' .. LEASE) > 0 then
      redis.call('HSET', WAITERS, UNCONFIRMED, channel)
      keep(WAITERS, 60000)
      local lease = {id = id, ticket = ticket, delay = 0, owner = owner}
      take_token(lease, now)
      put(lease, CONFIRM_MS)
      return id
    end
  end
end

-- Ends the lease; then the next in line has it. Where that needs an epoch first, the issuers that have waiters ask,
-- and one of them begins it.
local function end_lease()
  redis.call('DEL', LEASE)
  redis.call('HDEL', WAITERS, UNCONFIRMED)
  if redis.call('EXISTS', QUEUE) == 1 then
    local now = clock()
    if now.usable then
      hand_over(now)
    else
      publish_end('0')
    end
  end
  return {'released'}
end
