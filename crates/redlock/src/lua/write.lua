-- Checks that the server accepts writes, with a write that has no effect, because the lease of an
-- empty resource does not exist.
-- Returns {'none'}.
redis.call('SET', LEASE, '', 'XX')
return {'none'}
