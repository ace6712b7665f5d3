-- Starts the time of a lease anew, if it is held under this id.
-- ARGV: …, lease id, ttl in ms, 1 for a new token.
-- Answers {'granted', token}, {'lost'}, or {'epoch', history, epoch}.
local held = current()
if not held or held.id ~= ARGV[3] or not held.holds then
  return {'lost'}
end
local token = held.token
if ARGV[5] == '1' then
  local now = clock()
  if not now.usable then
    return needs_epoch(now)
  end
  token = next_token(now)
end
put(token, held.id, held.ticket, held.delay, held.owner, tonumber(ARGV[4]))
return {'granted', token}
