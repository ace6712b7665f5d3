-- Reads the leases of these keys, counters and leases in turns.
-- Answers for each {the value, id, token or '' if it does not count in this history, owner, ms left
-- of the lease, below 0 in its lock delay}, or {}.
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
