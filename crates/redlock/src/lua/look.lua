-- Reads several leases.
-- KEYS: a counter and a lease for each resource.
-- Returns for each resource {value, id, token, owner, ms left of the lease}, or {} if there is no
-- lease. The token is '' if it was stored under another replication id, and the ms are below 0
-- during the lock delay.
local history, answers = string.match(INFO, 'master_replid:(%x+)'), {}
for place = 2, #KEYS, 2 do
  local lease = current(KEYS[place])
  local found = {}
  if lease then
    local token = lease.history == history and lease.token or ''
    found = {lease.value, lease.id or '', token, lease.owner or '', digits(lease.left - lease.delay)}
  end
  answers[#answers + 1] = found
end
return answers
