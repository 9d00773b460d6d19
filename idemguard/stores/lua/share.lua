-- What the other waiters of one process came to, who never asked the server themselves.
--
-- ARGV[5]  for each label: the label, calls that found the claim, calls that reused the result
--          ..., as often as there are labels
-- returns  {"done"}

if damaged then return refused() end

local found = record.at and content()
local spent = found and found[2] ~= '' and spending(found[2])
for number = 5, #ARGV, 3 do
  local label, waited, reused = ARGV[number], tonumber(ARGV[number + 1]), tonumber(ARGV[number + 2])
  if waited > 0 then book(now, label, 'found', waited) end
  if reused > 0 then
    changed = true
    local kept = not found or found[3] ~= 'unstorable'
    book(now, label, kept and 'call_reused' or 'call_refused', reused)
    if kept then
      record.reused = record.reused + reused
      for _ = 1, spent and reused or 0 do spend(now, label, spent, 'saved_', 2, '') end
    end
  end
end
if changed then extend() end
write()
return {'done'}
