-- What all scripts begin with: their keys, and the clock of the partition.
--
-- KEYS: clock, lease, queue, waiters; all in one slot.
-- ARGV: 1 how many tokens an epoch has; 2 PUBLISH, or SPUBLISH in a cluster; 3 the number of the
-- database; 4 the source of epochs, empty where it is not known yet; 5 a fresh incarnation; 6 and 7
-- the highest epoch and number that the issuer has seen; 8 is 1 where a clock below them shall be
-- begun anew. What a script needs beside these follows.
local CLOCK, LEASE, QUEUE, WAITERS = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local SIZE, PUBLISH, DATABASE, SOURCE = tonumber(ARGV[1]), ARGV[2], ARGV[3], ARGV[4]
local SEEN_EPOCH, SEEN_N, REPLACES_CLOCK = tonumber(ARGV[6]), tonumber(ARGV[7]), ARGV[8] == '1'

-- tostring would round a number of 15 digits.
local function digits(number)
  return string.format('%.0f', number)
end

-- The clock as it stands:
-- `own`: it was written for this source and for the history of this server, which changes at each
--   restart and at each promotion of a replica. Blank until an epoch is begun.
-- `behind`: it has counted less far than the issuer has seen it count, so it was copied back.
-- `counts`: its epoch is the one in which tokens are granted, and leases are held.
-- `usable`: and there is a token left.
local function clock()
  local history = string.match(redis.call('INFO', 'replication'), 'master_replid:(%x+)')
  local found = redis.call('HMGET', CLOCK, 'source', 'history', 'incarnation', 'epoch', 'n')
  local epoch, n = tonumber(found[4] or ''), tonumber(found[5] or '')
  local now = {
    source = found[1], history = history, incarnation = found[3], epoch = epoch or 0, n = n or 0,
  }
  now.own = history and found[2] == history and (SOURCE == '' or found[1] == SOURCE)
    and found[3] and epoch
  local begun = now.own and n
  now.behind = begun and (epoch < SEEN_EPOCH or (epoch == SEEN_EPOCH and n < SEEN_N))
  now.counts = begun and not now.behind
  now.usable = now.counts and SOURCE ~= '' and n + 1 < SIZE
  return now
end

-- The answer where a grant needs an epoch first: the clock that it is to be begun on. A clock that
-- belongs to another history is blank from now on, under an incarnation of its own: an epoch that was
-- taken for another clock cannot begin on this one.
local function needs_epoch(now)
  if not now.history then
    return redis.error_reply('NOHISTORY this server does not tell its master_replid')
  end
  if SOURCE == '' or (now.source and now.source ~= SOURCE) then
    return {'source', now.source or ''}
  end
  if now.behind and not REPLACES_CLOCK then
    return {'behind'}
  end
  local epoch = math.max(now.epoch, SEEN_EPOCH)
  if not now.own or now.behind then
    now.incarnation = ARGV[5]
    redis.call('DEL', CLOCK)
    redis.call('HSET', CLOCK, 'source', SOURCE, 'history', now.history,
      'incarnation', now.incarnation, 'epoch', digits(epoch))
  elseif epoch > now.epoch then
    redis.call('HSET', CLOCK, 'epoch', digits(epoch))
  end
  return {'epoch', now.history, now.incarnation, digits(epoch)}
end

-- Takes the next token of a usable clock.
local function next_token(now)
  now.n = redis.call('HINCRBY', CLOCK, 'n', 1)
  return digits(now.epoch * SIZE + now.n)
end

-- The answer of a grant: its token, and how far the clock has counted.
local function granted(token, now)
  return {'granted', token, digits(now.epoch), digits(now.n)}
end
