-- Takes the key of a lease for one attempt at a grant, and writes a stamp into it. If there was no
-- key and the counter is usable, also seals a token: the proposal if it is above the counter, and
-- otherwise the next number of the counter. If the script runs again for the same attempt, it
-- changes nothing.
-- ARGV: …, number and ticket of the attempt, ttl in ms, lock delay in ms, owner, epoch and n of the
-- proposal or two empty strings.
-- Returns the words 'sealed' or 'taken', replication id, incarnation and serial of the stamp,
-- incarnation of the counter, usable, epoch, n, token or ''; or {'held', ms left, id}; or
-- {'older', number} if a newer attempt at this lease has taken the key; or the reply of `unfit`.
local number, ticket = ARGV[6], ARGV[7]
local now = counter()
local refusal = unfit(now)
if refusal then
  return refusal
end
local lease = current(LEASE)
if lease and not (lease.id == ID and lease.holds) then
  return {'held', digits(lease.left), lease.id or ''}
end
if lease and is_newer(lease, number, ticket) then
  return {'older', lease.number}
end
own(now)

-- A token is valid only under the replication id under which it was stored.
local same_history = lease and lease.history == now.history
if same_history and is_attempt(lease, number, ticket) then
  -- This run repeats an earlier run.
  return taken_reply(lease.mark == '1' and 'sealed' or 'taken', lease, now)
end
local serial = redis.call('HINCRBY', COUNTER, 'serial', 1)
local taken = {
  id = ID, number = number, ticket = ticket,
  history = now.history, incarnation = now.incarnation, serial = digits(serial),
  token = same_history and lease.token or '',
  mark = same_history and lease.ticket == ticket and lease.mark or '0',
  delay = tonumber(ARGV[9]),
  -- The lease keeps the owner that was named first.
  owner = lease and lease.owner ~= '' and lease.owner or ARGV[10],
}
local answer = 'taken'
if not lease and now.usable then
  local epoch, n = tonumber(ARGV[11]), tonumber(ARGV[12])
  if not epoch or epoch < now.epoch or (epoch == now.epoch and n <= now.n) then
    epoch, n = now.epoch, now.n + 1
  end
  if n < SIZE then
    raise(now, epoch, n)
    taken.token, taken.mark, answer = digits(epoch * SIZE + n), '1', 'sealed'
  end
end
redis.call('SET', LEASE, value_of(taken), 'PX', digits(tonumber(ARGV[8]) + taken.delay))
return taken_reply(answer, taken, now)
