-- What all scripts share: their keys, and the token counter of the partition.
--
-- Constants, in front of the script: SIZE, how many tokens an epoch has; PUBLISH, or SPUBLISH in a cluster;
--   DATABASE, the number of the database.
-- KEYS: the counter, the lease, the queue, the waiters; all in one slot.
-- ARGV: 1 the source of epochs, empty if it is not known yet; 2 a fresh incarnation; 3 the highest token that
--   the issuer has seen counted; 4 is 1 if a counter below that is replaced; 5 the time of the issuer, in
--   seconds since 1970. What a script needs besides follows.
local COUNTER, LEASE, QUEUE, WAITERS = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local SOURCE, SEEN, REPLACES = ARGV[1], tonumber(ARGV[3]), ARGV[4] == '1'

-- Concatenation rounds a number of 15 digits. Arguments and answers of Redis do not.
local function digits(number)
  return string.format('%.0f', number)
end

-- The counter as it stands:
-- `own`: it was written for this source and for the history of this server, which changes at each
--   restart and at each promotion of a replica. Blank until an epoch is begun.
-- `last`: the last token that it has counted.
-- `behind`: it has counted less far than the issuer has seen it count, so it was copied back.
-- `counts`: its epoch is the one in which tokens are granted, and leases are held.
-- `usable`: and there is a token left.
local function counter()
  local history = string.match(redis.call('INFO', 'replication'), 'master_replid:(%x+)')
  local found = redis.call('HMGET', COUNTER, 'source', 'history', 'incarnation', 'epoch', 'n')
  local epoch, n = tonumber(found[4] or ''), tonumber(found[5] or '')
  local now = {
    source = found[1], history = history, incarnation = found[3], epoch = epoch or 0,
    last = (epoch or 0) * SIZE + (n or 0),
  }
  now.own = history and found[2] == history and (SOURCE == '' or found[1] == SOURCE)
    and found[3] and epoch
  now.behind = now.own and n and now.last < SEEN
  now.counts = now.own and n and not now.behind
  now.usable = now.counts and SOURCE ~= '' and n + 1 < SIZE
  return now
end

-- The answer if a grant needs an epoch first: the counter that it is to be begun on. A counter that
-- belongs to another history is blank from now on, under an incarnation of its own: an epoch that was
-- taken for another counter cannot begin on this one.
local function needs_epoch(now)
  if not now.history then
    return redis.error_reply('NOHISTORY this server does not tell its master_replid')
  end
  if SOURCE == '' or (now.source and now.source ~= SOURCE) then
    return {'source', now.source or ''}
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
