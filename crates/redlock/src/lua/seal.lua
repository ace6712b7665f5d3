-- Stores the token that was chosen for an attempt, and raises the counter. If the key or the
-- counter has been replaced since the key was taken, the script changes nothing. It lowers neither
-- the token nor the counter. If the script runs again, it changes nothing.
-- ARGV: …, number and ticket of the attempt; replication id, incarnation and serial of the stamp;
-- the token; the epoch and the n of its count; the token that it replaces, or '' for a grant.
-- Returns {'sealed'} or {'refused'}.
local lease, now = current(LEASE), counter()
local is_taken = lease and lease.id == ID and lease.holds and is_attempt(lease, ARGV[6], ARGV[7])
  and lease.history == ARGV[8] and lease.incarnation == ARGV[9] and lease.serial == ARGV[10]
if not is_taken or not now.usable or now.history ~= ARGV[8] or now.incarnation ~= ARGV[9] then
  return {'refused'}
end
local token, replaced = ARGV[11], ARGV[14]
if lease.token ~= token then
  if replaced ~= '' and lease.token ~= replaced then
    return {'refused'}
  end
  if lease.token ~= '' and tonumber(lease.token) > tonumber(token) then
    return {'refused'}
  end
  if lease.token == '' then
    lease.mark = '1'
  end
  lease.token = token
  redis.call('SET', LEASE, value_of(lease), 'KEEPTTL')
end
raise(now, tonumber(ARGV[12]), tonumber(ARGV[13]))
return {'sealed'}
