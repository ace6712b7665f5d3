-- Checks the server.
-- KEYS: a counter, for its slot.
-- ARGV: PUBLISH, or SPUBLISH in a cluster, and a channel.
-- Returns {1 if a script can read the replication id and 0 if not, the maxmemory-policy, the error
-- of a publication or '' if it succeeded}.
local function info(section, pattern)
  local text = redis.pcall('INFO', section)
  return type(text) == 'string' and string.match(text, pattern) or ''
end
local history = info('replication', 'master_replid:(%x+)')
local published = redis.pcall(ARGV[1], ARGV[2], '')
local refused = type(published) == 'table' and published.err or ''
return {history ~= '' and 1 or 0, info('memory', 'maxmemory_policy:(%S+)'), refused}
