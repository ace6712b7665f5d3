-- Whether the server tells its history inside a script, what it does when memory runs out, and what
-- it says against publishing.
-- KEYS: a clock, for its slot. ARGV: PUBLISH, or SPUBLISH in a cluster, and a channel.
local function info(section, pattern)
  local text = redis.pcall('INFO', section)
  return type(text) == 'string' and string.match(text, pattern) or ''
end
local history = info('replication', 'master_replid:(%x+)')
local published = redis.pcall(ARGV[1], ARGV[2], '')
local refused = type(published) == 'table' and published.err or ''
return {history ~= '' and 1 or 0, info('memory', 'maxmemory_policy:(%S+)'), refused}
