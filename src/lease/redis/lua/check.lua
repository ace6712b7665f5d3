-- Whether the server tells its history inside a script, and what it does when memory runs out.
local history = string.match(redis.call('INFO', 'replication'), 'master_replid:(%x+)')
local policy = string.match(redis.call('INFO', 'memory'), 'maxmemory_policy:(%S+)')
return {history and 1 or 0, policy or ''}
