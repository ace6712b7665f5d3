-- Reads several leases.
-- KEYS: a counter and a lease for each resource.
-- Returns 'found', and eight words for each resource: the value of its lease, the id, the number
-- and the ticket of the attempt, the token, the mark and the owner in this value, and the remaining
-- time in ms. All eight are '' if there is no lease. The token is '' if it was stored under another
-- replication id, and the time is below 0 during the lock delay.
local history, words = history_of(replication()), {'found'}
for place = 2, #KEYS, 2 do
  local lease = current(KEYS[place])
  local found = {'', '', '', '', '', '', '', ''}
  if lease then
    local token = lease.history == history and lease.token or ''
    found = {
      lease.value, lease.id or '', lease.number or '', lease.ticket or '', token, lease.mark or '',
      lease.owner or '', digits(lease.left - lease.delay),
    }
  end
  for _, word in ipairs(found) do
    words[#words + 1] = word
  end
end
return words
