-- What all scripts of a node begin with: its clock of the partition, and the lease of the resource.
--
-- KEYS: clock, lease.
-- ARGV: 1 the source of epochs, empty where it is not known yet; 2 the nodes of the quorum; 3 a fresh
-- incarnation; 4 the lease id, which is a part of its digest: see stored_id.rs. What a script needs beside
-- these follows.
local CLOCK, LEASE = KEYS[1], KEYS[2]
local SOURCE, NODES, FRESH, ID = ARGV[1], ARGV[2], ARGV[3], ARGV[4]

-- tostring would round a number of 15 digits.
local function digits(number)
  return string.format('%.0f', number)
end

-- The clock as it stands:
-- `own`: it was written under the history of this node, which changes at each restart.
-- `usable`: and it has an epoch. Without one, `epoch` is the one that was known last.
local function clock()
  local info = redis.call('INFO', 'replication')
  local found = redis.call('HMGET', CLOCK, 'source', 'nodes', 'history', 'incarnation', 'epoch', 'n')
  local now = {
    alone = string.find(info, 'role:master', 1, true) and string.find(info, 'connected_slaves:0', 1, true),
    history = string.match(info, 'master_replid:(%x+)'),
    source = found[1], nodes = found[2], incarnation = found[4],
    epoch = tonumber(found[5] or '') or 0, n = tonumber(found[6] or ''),
  }
  now.own = now.history and found[3] == now.history and now.incarnation
  now.usable = now.own and now.n
  return now
end

-- The answer where this node cannot be used: the clock is that of another source of epochs or of another
-- set of nodes, or another server may take the place of this one. Nothing changes then.
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

-- The lease as it stands, or nil. Its stamp is what this node gave it when its key was set: `history`,
-- `incarnation` and `serial`. The key outlives the lease by its lock delay: `holds` tells whether its holder
-- still has it, `left` how long the resource stays closed.
local function current()
  local value = redis.call('GET', LEASE)
  if not value then
    return nil
  end
  local pattern = '^([^:]*):(%d+):(%d+):(%x*):(%x*):(%d+):(%d*):(%d+):(.*)$'
  local id, number, nonce, history, incarnation, serial, token, delay, owner = string.match(value, pattern)
  local left = redis.call('PTTL', LEASE)
  delay = tonumber(delay or 0)
  return {
    value = value, id = id, number = number, nonce = nonce, history = history, incarnation = incarnation,
    serial = serial, token = token, delay = delay, owner = owner, left = left, holds = left >= delay,
  }
end

local function is_attempt(lease, number, nonce)
  return lease.number == number and lease.nonce == nonce
end

-- What is stored of a lease.
local function value_of(lease)
  return table.concat({
    lease.id, lease.number, lease.nonce, lease.history, lease.incarnation, lease.serial, lease.token,
    digits(lease.delay), lease.owner,
  }, ':')
end

-- How far a clock has counted, for an answer: whether it is usable, epoch, n.
local function counted(now)
  return now.usable and '1' or '0', digits(now.epoch), digits(now.n or 0)
end
