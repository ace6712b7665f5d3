-- What a server must be to be a node, at the first contact.
-- Answers {'node', run id, whether it is part of a cluster, what it does when memory runs out}, or
-- what unfit does.
local function info(section, pattern)
  return string.match(redis.call('INFO', section), pattern) or ''
end
local refusal = unfit(counter())
if refusal then
  return refusal
end
return {'node', info('server', 'run_id:(%x+)'), info('cluster', 'cluster_enabled:(%d)'),
  info('memory', 'maxmemory_policy:(%S+)')}
