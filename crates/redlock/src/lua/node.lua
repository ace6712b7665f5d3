-- What all scripts of a node begin with: the token counter of the partition, and the lease of the
-- resource.
--
-- KEYS: counter, lease. Scripts that read several resources have a pair for each.
-- ARGV: 1 the source of epochs, empty if it is not known yet; 2 the nodes of the quorum; 3 a fresh
-- incarnation; 4 how many tokens an epoch has; 5 the lease id, as a part of its digest. What a
-- script needs beside these follows.
local COUNTER, LEASE = KEYS[1], KEYS[2]
local SOURCE, NODES, FRESH, SIZE, ID = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4]), ARGV[5]
local INFO = redis.call('INFO', 'replication')

-- tostring would round a number of 15 digits.
local function digits(number)
  return string.format('%.0f', number)
end

-- The counter as it stands:
-- `own`: it was written in the current history of this node, which changes at each restart.
-- `usable`: it is its own, and an epoch has begun on it. Otherwise `epoch` is the last one that was
-- known.
local function counter()
  local found = redis.call('HMGET', COUNTER, 'source', 'nodes', 'history', 'incarnation', 'epoch', 'n')
  local now = {
    alone = string.find(INFO, 'role:master', 1, true) and string.find(INFO, 'connected_slaves:0', 1, true),
    history = string.match(INFO, 'master_replid:(%x+)'),
    source = found[1], nodes = found[2], incarnation = found[4],
    epoch = tonumber(found[5] or '') or 0, n = tonumber(found[6] or ''),
  }
  now.own = now.history and found[3] == now.history and now.incarnation
  now.usable = now.own and now.n
  return now
end

-- The answer if this node cannot be used: its counter belongs to another source of epochs or to
-- another set of nodes, or another server may replace this one. Nothing changes then.
local function unfit(now)
  if not now.history then
    return {'history'}
  end
  if not now.alone then
    return {'replicated'}
  end
  if now.source and SOURCE ~= '' and now.source ~= SOURCE then
    return {'source', now.source}
  end
  if now.nodes and now.nodes ~= NODES then
    return {'nodes', now.nodes}
  end
  return nil
end

-- Makes a counter that is not its own a blank one, under an incarnation of its own: no seal and no
-- epoch that was meant for an earlier counter fits it.
local function own(now)
  if now.own then
    return
  end
  now.incarnation, now.n, now.own = FRESH, nil, true
  redis.call('DEL', COUNTER)
  redis.call('HSET', COUNTER, 'source', SOURCE, 'nodes', NODES, 'history', now.history,
    'incarnation', FRESH, 'serial', '0', 'epoch', digits(now.epoch))
end

-- Raises a usable counter; it never goes back.
local function raise(now, epoch, n)
  if epoch > now.epoch or (epoch == now.epoch and n > now.n) then
    redis.call('HSET', COUNTER, 'epoch', digits(epoch), 'n', digits(n))
    now.epoch, now.n = epoch, n
  end
end

-- The lease as it stands, or nil. Its stamp is what this node gave it when its key was set:
-- `history`, `incarnation` and `serial`. `mark` is 1 if its token was sealed by its own request,
-- over no earlier one. The key outlives the lease by its lock delay: `holds` tells whether the
-- lease is held, `left` how long the resource stays blocked.
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

-- What is stored of a lease.
local function value_of(lease)
  return table.concat({
    lease.id, lease.number, lease.ticket, lease.history, lease.incarnation, lease.serial, lease.token,
    lease.mark, digits(lease.delay), lease.owner,
  }, ':')
end

local function is_attempt(lease, number, ticket)
  return lease.number == number and lease.ticket == ticket
end

-- Whether the attempt of a lease is newer than this one: by its number, then by its ticket, as a
-- text.
local function is_newer(lease, number, ticket)
  local mine, theirs = tonumber(number), tonumber(lease.number)
  return theirs > mine or (theirs == mine and lease.ticket > ticket)
end

-- How far a counter has counted, for an answer: whether it is usable, epoch, n.
local function counted(now)
  return now.usable and '1' or '0', digits(now.epoch), digits(now.n or 0)
end
