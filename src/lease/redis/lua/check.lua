-- Whether the server tells its history inside a script, and what it does when memory runs out.
local function info(section, pattern)
  local text = redis.pcall('INFO', section)
  return type(text) == 'string' and string.match(text, pattern) or ''
end
local history = info('replication', 'master_replid:(%x+)')
return {history ~= '' and 1 or 0, info('memory', 'maxmemory_policy:(%S+)')}
