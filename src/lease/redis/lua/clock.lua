-- What all scripts begin with: their keys, and the clock of the partition.
--
-- KEYS: clock, lease, queue, waiters; all in one slot.
-- ARGV[1]: how many tokens an epoch has. ARGV[2]: PUBLISH, or SPUBLISH in a cluster. What a script
-- needs beside these follows.
local CLOCK, LEASE, QUEUE, WAITERS = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local SIZE, PUBLISH = tonumber(ARGV[1]), ARGV[2]

-- The clock, where it belongs to the history of this server and has a token left. The history
-- changes at each restart and at each promotion of a replica.
local function clock()
  local history = string.match(redis.call('INFO', 'replication'), 'master_replid:(%x+)')
  local found = redis.call('HMGET', CLOCK, 'history', 'epoch', 'n')
  local epoch, n = tonumber(found[2] or ''), tonumber(found[3] or '')
  local usable = history and found[1] == history and epoch and n and n + 1 < SIZE
  return {history = history, epoch = epoch or 0, n = n, usable = usable}
end

-- The answer where a grant needs an epoch first. Nothing has changed for it.
local function needs_epoch(now)
  if not now.history then
    return redis.error_reply('NOHISTORY this server does not tell its master_replid')
  end
  return {'epoch', now.history, string.format('%.0f', now.epoch)}
end

-- Takes the next token of a usable clock. tostring would round a number of 15 digits.
local function next_token(now)
  now.n = redis.call('HINCRBY', CLOCK, 'n', 1)
  return string.format('%.0f', now.epoch * SIZE + now.n)
end
