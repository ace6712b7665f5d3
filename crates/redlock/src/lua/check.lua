-- Checks a server: at its first request, and again after failures, or if another node is the same
-- server.
-- Returns {'node', run id, '1' if it is part of a cluster, its maxmemory-policy}, or the reply of
-- `unfit`.
local function info(section, pattern)
  return string.match(redis.call('INFO', section), pattern) or ''
end
-- This partition may belong to another issuer. The node can still be used if another partition
-- belongs to this issuer.
local now = counter()
now.source, now.nodes = nil, nil
local refusal = unfit(now)
if refusal then
  return refusal
end
return {'node', info('server', 'run_id:(%x+)'), info('cluster', 'cluster_enabled:(%d)'),
  info('memory', 'maxmemory_policy:(%S+)')}
