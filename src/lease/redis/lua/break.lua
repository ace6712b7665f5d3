-- Ends whatever lease there is, or the one with this token, by force; then the next in line has it.
-- ARGV: …, a token or ''. Answers {'released'}, or {'lost'} where there was none.
local held = current()
if not held or (ARGV[9] ~= '' and held.token ~= ARGV[9]) then
  return {'lost'}
end
return end_lease()
