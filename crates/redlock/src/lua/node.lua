-- The first part of every script: the token counter of the partition, and the lease of the
-- resource.
--
-- KEYS: counter, lease. A script that reads several resources has a pair for each.
-- ARGV: 1 the source of epochs, or '' if the issuer does not know it yet; 2 the nodes of the
-- quorum; 3 a new incarnation; 4 the number of tokens in an epoch; 5 the stored form of the lease
-- id, which is a part of its digest. The arguments of the particular script follow.
local COUNTER, LEASE = KEYS[1], KEYS[2]
local SOURCE, NODES, FRESH, SIZE, ID = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4]), ARGV[5]

local function replication()
  return redis.call('INFO', 'replication')
end

local function history_of(info)
  return string.match(info, 'master_replid:(%x+)')
end

-- Formats a number without rounding. `tostring` would round a number of 15 digits.
local function digits(number)
  return string.format('%.0f', number)
end

-- Returns the counter:
-- `alone`: this node is a master without replicas.
-- `history`: the replication id of this node, which changes at each restart.
-- `own`: the counter was written under the current replication id.
-- `usable`: the counter is `own`, and an epoch has begun on it. If no epoch has begun, `epoch` is
--   the last known epoch.
local function counter()
  local info = replication()
  local found = redis.call('HMGET', COUNTER, 'source', 'nodes', 'history', 'incarnation', 'epoch', 'n')
  local now = {
    alone = string.find(info, 'role:master', 1, true) and string.find(info, 'connected_slaves:0', 1, true),
    history = history_of(info),
    source = found[1], nodes = found[2], incarnation = found[4],
    epoch = tonumber(found[5] or '') or 0, n = tonumber(found[6] or ''),
  }
  now.own = now.history and found[3] == now.history and now.incarnation
  now.usable = now.own and now.n
  return now
end

-- Returns the reply for a counter of another set of nodes or of another source of epochs.
local function foreign(source, nodes)
  if nodes and nodes ~= NODES then
    return {'nodes', nodes}
  end
  if source and SOURCE ~= '' and source ~= SOURCE then
    return {'source', source}
  end
  return nil
end

-- Returns the reply of a node that cannot be used, or nil. If there is a reply, the script changes
-- nothing. Such a node does not report its replication id, has replicas or is a replica, or has a
-- counter that belongs to another set of nodes or to another source of epochs. If the partition has
-- no counter, the node cannot be used if other partitions have counters and none of them belongs to
-- this issuer. Without this rule, an issuer that was started by mistake would become the owner of
-- each partition that no issuer has used. 'nodes' takes precedence over 'source', because it makes
-- the whole step fail.
local function unfit(now)
  if not now.history then
    return {'history'}
  end
  if not now.alone then
    return {'replicated'}
  end
  if now.nodes then
    return foreign(now.source, now.nodes)
  end
  local refusal
  for partition = 0, 255 do
    local other = string.gsub(COUNTER, '{%d+}:counter$', '{' .. partition .. '}:counter')
    local found = redis.call('HMGET', other, 'source', 'nodes')
    if found[2] then
      local reply = foreign(found[1], found[2])
      if not reply then
        return nil
      end
      if not refusal or reply[1] == 'nodes' then
        refusal = reply
      end
    end
  end
  return refusal
end

-- Replaces a counter that is not `own` with a blank counter, which has a new incarnation. A seal or
-- an epoch for an earlier counter does not match the new incarnation.
local function own(now)
  if now.own then
    return
  end
  now.incarnation, now.n, now.own = FRESH, nil, true
  redis.call('DEL', COUNTER)
  redis.call('HSET', COUNTER, 'source', SOURCE, 'nodes', NODES, 'history', now.history,
    'incarnation', FRESH, 'serial', '0', 'epoch', digits(now.epoch))
end

-- Raises a usable counter. Never lowers it.
local function raise(now, epoch, n)
  if epoch > now.epoch or (epoch == now.epoch and n > now.n) then
    redis.call('HSET', COUNTER, 'epoch', digits(epoch), 'n', digits(n))
    now.epoch, now.n = epoch, n
  end
end

-- Returns the lease, or nil. Its stamp consists of `history`, `incarnation` and `serial`, which
-- this node wrote when an attempt took the key. `mark` is 1 if the request that took the key has
-- sealed a token in it, and the key had no token before. The key lasts longer than the lease by the
-- lock delay. `holds` is whether the lease is held, and `left` is the number of ms for which the
-- resource stays blocked.
local function current(key)
  local value = redis.call('GET', key)
  if not value then
    return nil
  end
  local pattern = '^([^:]*):(%d+):(%d+):(%x*):(%x*):(%d+):(%d*):([01]):(%d+):(.*)$'
  local id, number, ticket, history, incarnation, serial, token, mark, delay, owner =
    string.match(value, pattern)
  local left = redis.call('PTTL', key)
  delay = tonumber(delay or 0)
  return {
    value = value, id = id, number = number, ticket = ticket, history = history, incarnation = incarnation,
    serial = serial, token = token, mark = mark, delay = delay, owner = owner,
    left = left, holds = left >= delay,
  }
end

-- Returns the value of a lease, as it is stored.
local function value_of(lease)
  return lease.id .. ':' .. lease.number .. ':' .. lease.ticket .. ':' .. lease.history
    .. ':' .. lease.incarnation .. ':' .. lease.serial .. ':' .. lease.token .. ':' .. lease.mark
    .. ':' .. digits(lease.delay) .. ':' .. lease.owner
end

-- Returns whether the key of a lease was taken by this attempt.
local function is_attempt(lease, number, ticket)
  return lease.number == number and lease.ticket == ticket
end

-- Returns whether the attempt of a lease is newer than the given attempt. Numbers are compared
-- first, and then tickets as strings.
local function is_newer(lease, number, ticket)
  local mine, theirs = tonumber(number), tonumber(lease.number)
  return theirs > mine or (theirs == mine and lease.ticket > ticket)
end

-- Returns the count of a counter in the form that replies contain: usable, epoch, n.
local function counted(now)
  return now.usable and '1' or '0', digits(now.epoch), digits(now.n or 0)
end

-- Returns the reply for a taken key, as one string of words that are separated by spaces, because a
-- reply of several strings takes longer. `answer` is 'sealed' or 'taken'.
local function taken_reply(answer, lease, now)
  local usable, epoch, n = counted(now)
  return answer .. ' ' .. lease.history .. ' ' .. lease.incarnation .. ' ' .. lease.serial
    .. ' ' .. now.incarnation .. ' ' .. usable .. ' ' .. epoch .. ' ' .. n .. ' ' .. lease.token
end
