-- Checks the server.
-- KEYS: in a cluster, the key of a counter, whose slot determines the node.
-- ARGV: PUBLISH, or SPUBLISH in a cluster, and a channel.
-- Returns {1 if a script can read a replication id that changes at each promotion and 0 if not,
-- 1 if the server belongs to a cluster and 0 if not, the maxmemory-policy, the error of a
-- publication or '' if it succeeded}.
local function info(section, pattern)
  local text = redis.pcall('INFO', section)
  return type(text) == 'string' and string.match(text, pattern) or ''
end
-- Dragonfly keeps its replication id when it is promoted.
local is_kept = info('server', 'dragonfly_version') ~= ''
local history = info('replication', 'master_replid:(%x+)')
local published = redis.pcall(ARGV[1], ARGV[2], '')
local refused = type(published) == 'table' and published.err or ''
local clustered = info('cluster', 'cluster_enabled:(%d)') == '1'
return {
  history ~= '' and not is_kept and 1 or 0, clustered and 1 or 0,
  info('memory', 'maxmemory_policy:(%S+)'), refused,
}
