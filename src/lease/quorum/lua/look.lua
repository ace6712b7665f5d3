-- Tells what there is.
-- Answers {'found', the value, id, token or '' where it counts no more, owner, ms left of the lease, below 0 in its
-- lock delay}, or {'none'}.
local lease = current()
if not lease then
  return {'none'}
end
local token = lease.history == clock().history and lease.token or ''
return {'found', lease.value, lease.id or '', token, lease.owner or '', digits(lease.left - lease.delay)}
