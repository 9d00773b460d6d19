-- The call leaves before its body started, whatever its Begin may have got.
--
-- ARGV[5]  nonce            ARGV[7]  outcome; "" = it goes on under another nonce
-- ARGV[6]  label
-- returns  {"done", whom it hints at}

if damaged then return refused() end

-- a line that is no execution after all
local function unbook(line)
  start(line, before.runs - 1, -1)
  miss(line[STARTED], line[LABEL], spending(line[SPENT]), -1)
  if line[STATUS] == 'lost' then book(line[STARTED], line[LABEL], 'lost', -1) end
end

local nonce = ARGV[5]
if not has(record.leavers, nonce) then
  changed = true
  record.leavers[#record.leavers + 1] = nonce
  while #record.leavers > LEAVERS do table.remove(record.leavers, 1) end
  if ARGV[7] ~= '' then book(now, ARGV[6], 'call_' .. ARGV[7], 1) end
end
local lines, removed = {}, {}
for _, line in ipairs(record.lines) do
  if line[NONCE] == nonce and not line[ENDED] then
    removed[#removed + 1] = line
  else
    lines[#lines + 1] = line
  end
end
if removed[1] then
  changed, lined = true, true
  record.lines, record.runs = lines, record.runs - #removed
  for _, line in ipairs(removed) do
    vacate(line)
    unbook(line)
  end
end
if changed then extend() end
write()
return {'done', hint()}
