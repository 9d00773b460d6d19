-- What settles a record: a result that is kept, and what is told lost.
--
-- This part stands between windows.lua and the commands that need it.

local function tell_lost()
  for number, line in ipairs(record.lines) do
    if told(line) ~= line[STATUS] then
      local lost = copy(line)
      lost[STATUS] = 'lost'
      record.lines[number] = lost
      changed, lined = true, true
    end
  end
end

-- a result is kept: whoever held the claim holds it no longer
local function keep(kept_source, spent, codec, data, fresh, gone)
  changed, renewed = true, true
  record.at, record.fresh, record.gone = now, fresh, gone
  record.value = {kept_source, spent, codec, data}
  record.leader, record.fallback, record.generation = false, false, false
  record.cause, record.settled = 'expired', record.token
end
