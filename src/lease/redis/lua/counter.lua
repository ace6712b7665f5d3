-- The first part of every script: the keys, and the token counter of the partition.
--
-- Constants, which are set before the script: SIZE, the number of tokens in an epoch; PUBLISH, the
--   command, which is SPUBLISH in a cluster; DATABASE, the number of the database.
-- KEYS: the counter, the lease, the queue, the waiters; all in one slot.
-- ARGV: 1 the source of epochs, or '' if the issuer does not know it yet; 2 a new incarnation; 3
--   the highest token that the issuer has seen the counter reach; 4 is 1 if a counter below that
--   token must be replaced; 5 the time of the issuer, in seconds since 1970. The arguments of the
--   particular script follow.
local COUNTER, LEASE, QUEUE, WAITERS = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local SOURCE, SEEN, REPLACES = ARGV[1], tonumber(ARGV[3]), ARGV[4] == '1'

-- Formats a number for concatenation, which would otherwise round a number of 15 digits. Redis does
-- not round numbers in the arguments of commands and in replies.
local function digits(number)
  return string.format('%.0f', number)
end

-- Returns the counter:
-- `history`: the replication id of this server, which changes at each restart and at each promotion
--   of a replica.
-- `own`: the counter was written for this source of epochs and under this replication id. The
--   counter is blank until an epoch begins on it.
-- `last`: the last token that the counter has counted.
-- `behind`: the counter is below the highest token that the issuer has seen it reach.
-- `counts`: the tokens of the counter, and the leases with these tokens, are valid.
-- `is_master`: this server is a master. A replica has the replication id and the counter of its
--   master, and may accept writes.
-- `usable`: `counts` is true, this server is a master, the source is known, and the epoch has a
--   token left.
local function counter()
  local info = redis.call('INFO', 'replication')
  local history = string.match(info, 'master_replid:(%x+)')
  local found = redis.call('HMGET', COUNTER, 'source', 'history', 'incarnation', 'epoch', 'n')
  local epoch, n = tonumber(found[4] or ''), tonumber(found[5] or '')
  local now = {
    source = found[1], history = history, incarnation = found[3], epoch = epoch or 0,
    last = (epoch or 0) * SIZE + (n or 0), is_master = string.find(info, 'role:master', 1, true),
  }
  now.own = history and found[2] == history and (SOURCE == '' or found[1] == SOURCE)
    and found[3] and epoch
  now.behind = now.own and n and now.last < SEEN
  now.counts = now.own and n and not now.behind
  now.usable = now.counts and now.is_master and SOURCE ~= '' and n + 1 < SIZE
  return now
end

-- Returns the source of epochs to which the counters of other partitions belong, or nil if one of
-- them belongs to this source, or if there are none. In a cluster, a script cannot read these
-- counters, because they are in other slots.
local function other_source()
  if PUBLISH == 'SPUBLISH' then
    return nil
  end
  local theirs
  for partition = 0, 255 do
    local counter = string.gsub(COUNTER, '{%d+}:clock$', '{' .. partition .. '}:clock')
    local found = redis.pcall('HGET', counter, 'source')
    if found == SOURCE then
      return nil
    end
    theirs = theirs or type(found) == 'string' and found
  end
  return theirs
end

-- Returns the reply for a grant that needs an epoch first. The reply identifies the counter on
-- which the epoch must begin. If the counter was written under another replication id, or must be
-- replaced because it is behind, this function first replaces it with a blank counter with a new
-- incarnation. An epoch that was taken for another counter cannot begin on the blank counter.
local function needs_epoch(now)
  if not now.is_master then
    return redis.error_reply('READONLY this server is a replica')
  end
  if not now.history then
    return redis.error_reply('NOHISTORY this server does not report its master_replid')
  end
  if SOURCE == '' or (now.source and now.source ~= SOURCE) then
    return {'source', now.source or ''}
  end
  -- Without this check, an issuer that was started by mistake would become the owner of each
  -- partition that no issuer has used.
  local theirs = not now.source and other_source()
  if theirs then
    return {'source', theirs}
  end
  if now.behind and not REPLACES then
    return {'behind'}
  end
  local epoch = math.max(now.epoch, math.floor(SEEN / SIZE))
  if not now.own or now.behind then
    now.incarnation = ARGV[2]
    redis.call('DEL', COUNTER)
    redis.call('HSET', COUNTER, 'source', SOURCE, 'history', now.history,
      'incarnation', now.incarnation, 'epoch', epoch)
  elseif epoch > now.epoch then
    redis.call('HSET', COUNTER, 'epoch', epoch)
  end
  return {'epoch', now.history, now.incarnation, epoch}
end
