-- Takes the key of a lease for one attempt at a grant, and gives it a stamp. Without a token it is no grant yet.
-- ARGV: …, number and nonce of the attempt, ttl in ms, lock delay in ms, owner; 1 where only a lease that has a
-- token already may be taken, for another one.
-- Answers {'taken', history, incarnation, serial, usable, epoch, n, token or ''}, {'held', ms left, id},
-- {'older', number} where a newer attempt of this lease was here, {'lost'}, or what unfit does.
local number, nonce, owner = ARGV[5], ARGV[6], ARGV[9]
local ttl, delay, only_mine = tonumber(ARGV[7]), tonumber(ARGV[8]), ARGV[10] == '1'

local now = clock()
local refusal = unfit(now)
if refusal then
  return refusal
end
local lease = current()
if lease and lease.id == ID and lease.holds then
  local mine, theirs = tonumber(number), tonumber(lease.number)
  if theirs > mine or (theirs == mine and tonumber(lease.nonce) > tonumber(nonce)) then
    return {'older', lease.number}
  end
elseif only_mine then
  return {'lost'}
elseif lease then
  return {'held', digits(lease.left), lease.id}
end
-- A token counts under the history in which it was stored.
local same_history = lease and lease.history == now.history
if only_mine and (not same_history or lease.token == '') then
  return {'lost'}
end

if not now.own then
  -- Blank from now on, under an incarnation of its own, so that no seal that was meant for an earlier clock
  -- fits to this one.
  now.incarnation, now.n = FRESH, nil
  redis.call('DEL', CLOCK)
  redis.call('HSET', CLOCK, 'source', SOURCE, 'nodes', NODES, 'history', now.history,
    'incarnation', FRESH, 'serial', '0', 'epoch', digits(now.epoch))
end
local taken = {id = ID, number = number, nonce = nonce, delay = delay, owner = owner, token = ''}
if same_history then
  taken.token = lease.token
end
if lease then
  -- The owner stays the one that was named first.
  taken.owner = lease.owner ~= '' and lease.owner or owner
  taken.delay = only_mine and lease.delay or delay
end
if same_history and is_attempt(lease, number, nonce) then
  taken.history, taken.incarnation, taken.serial = lease.history, lease.incarnation, lease.serial
else
  local serial = redis.call('HINCRBY', CLOCK, 'serial', 1)
  taken.history, taken.incarnation, taken.serial = now.history, now.incarnation, digits(serial)
end
redis.call('SET', LEASE, value_of(taken), 'PX', digits(ttl + taken.delay))
local usable, epoch, n = counted(now)
return {'taken', taken.history, taken.incarnation, taken.serial, usable, epoch, n, taken.token}
