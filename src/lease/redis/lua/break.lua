-- Ends whatever lease there is, by force; then the next in line has it.
-- Answers {'released'}, {'lost'} where there was none, or what needs_epoch does: released, but the
-- next in line needs an epoch first.
if redis.call('EXISTS', LEASE) == 0 then
  return {'lost'}
end
return end_lease()
