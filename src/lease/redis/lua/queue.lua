-- The part of every script after the counter: the lease of a resource, and the queue of the
-- requests that wait for it.
--
-- A lease id, here and in the arguments, is its stored form, which is a part of its digest; see
-- `LeaseDigest::stored`.

-- The time within which a request must confirm a lease that was granted to it from the queue.
local CONFIRM_MS = 1000
-- The field in WAITERS with the channel of the issuer that must still confirm a lease. This name
-- differs from every lease id, because no lease id is empty.
local UNCONFIRMED = ''

-- Parses the stored value of a lease. Returns nil if there is no value. `ticket` is that of the
-- request to which the lease was granted, or `*` if more than one request has used the lease id.
-- `counted` is the last token of the counter when the token of the lease was taken. `since` is the
-- time of the grant by the clock of an issuer.
--
-- The key lasts longer than the lease by the lock delay. `holds` is whether the lease is held, and
-- `left` is the number of ms for which the resource stays blocked. `left` is nil if the lease has
-- no lock delay; see `left_of`.
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

-- Returns the lease of the resource, or nil if the resource is free.
local function current()
  return parse(redis.call('GET', LEASE))
end

-- Returns the number of ms for which the resource stays blocked if the lease is not renewed,
-- released or broken.
local function left_of(lease)
  return lease.left or redis.call('PTTL', LEASE)
end

-- Returns whether the token of the lease comes from this counter. If not, the lease comes from a
-- restored copy of the data, and its token may be superseded.
local function counts(lease, now)
  return now.counts and lease.counted and lease.counted >= now.epoch * SIZE and lease.counted <= now.last
end

-- Takes the next token of a usable counter for a lease.
local function take_token(lease, now)
  now.last = now.last + 1
  redis.call('HSET', COUNTER, 'n', now.last - now.epoch * SIZE)
  lease.token, lease.counted = now.last, now.last
end

-- Publishes the number of ms for which the resource stays blocked, to the issuers with waiters in
-- this partition.
local function publish_end(ms)
  -- All databases of a server share the channels, so the name contains the number of the database.
  local everybody = string.gsub(COUNTER, 'clock$', DATABASE .. ':everybody')
  redis.call(PUBLISH, everybody, digits(ms) .. ' ' .. LEASE)
end

-- Stores a lease, and returns the number of ms for which the resource is blocked.
local function put(lease, ttl)
  local value = string.format('%.0f:%.0f:%s:%s:%.0f:%s:%s', lease.token, lease.counted, lease.id,
    lease.ticket, lease.delay, lease.since, lease.owner)
  local ms = ttl + lease.delay
  redis.call('SET', LEASE, value, 'PX', ms)
  return ms
end

-- Returns the reply for a grant: its token, and the last token of the counter.
local function granted(lease, now)
  return {'granted', lease.token, now.last}
end

-- Returns the stored data of the waiter under an id: the ticket of its latest request, the channel
-- of its issuer, and the owner.
local function waiter(id)
  return string.match(redis.call('HGET', WAITERS, id) or '', '^([^\n]*)\n([^\n]*)\n(.*)$')
end

-- Removes the waiter under an id from the queue.
local function leave(id)
  redis.call('ZREM', QUEUE, id)
  redis.call('HDEL', WAITERS, id)
end

-- Grants a free lease to the first waiter whose issuer still listens. Returns false if there is no
-- such waiter.
--
-- The lease lasts CONFIRM_MS, unless the waiter confirms it with another request. If the previous
-- lease from the queue expired without a confirmation, the issuer of its waiter is subscribed but
-- does not respond. This function then removes all waiters of that issuer from the queue, and
-- notifies the issuer, which makes them retry. `was_held` is true if the previous lease was
-- released or broken before it expired.
local function hand_over(now, was_held)
  local lapsed = not was_held and redis.call('HGET', WAITERS, UNCONFIRMED)
  if lapsed then
    redis.call('HDEL', WAITERS, UNCONFIRMED)
    redis.call(PUBLISH, lapsed, '* ' .. LEASE)
    for _, id in ipairs(redis.call('ZRANGE', QUEUE, 0, -1)) do
      local _, channel = waiter(id)
      if channel == lapsed then
        leave(id)
      end
    end
  end
  while true do
    local id = redis.call('ZPOPMIN', QUEUE)[1]
    if not id then
      return false
    end
    local ticket, channel, owner = waiter(id)
    local listens = channel and redis.call(PUBLISH, channel, ticket .. ' ' .. LEASE) > 0
    if listens then
      -- Set this field before the waiter leaves, because an empty hash would lose its time to live.
      redis.call('HSET', WAITERS, UNCONFIRMED, channel)
    end
    redis.call('HDEL', WAITERS, id)
    if listens then
      local lease = {id = id, ticket = ticket, delay = 0, since = ARGV[5], owner = owner}
      take_token(lease, now)
      publish_end(put(lease, CONFIRM_MS))
      return true
    end
  end
end

-- Removes the lease, and grants the resource to the first waiter whose issuer listens. If there is
-- no such waiter, or the grant needs an epoch first, notifies the issuers with waiters, which then
-- retry.
local function end_lease()
  if redis.call('EXISTS', QUEUE, WAITERS) == 0 then
    -- No request waits.
    redis.call('DEL', LEASE)
    return {'released'}
  end
  local now = counter()
  if now.usable and hand_over(now, true) then
    return {'released'}
  end
  redis.call('DEL', LEASE)
  redis.call('HDEL', WAITERS, UNCONFIRMED)
  publish_end(0)
  return {'released'}
end
