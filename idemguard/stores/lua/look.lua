-- One record, and its result.
--
-- returns  {now} where there is none, {now, head, lines, result}:
--          head     {token, leader, fallback, cause, generation, settled, digest, runs, reused,
--                   ordered, kept_until, made, workers, leavers}; "" = none
--          lines    {source, until, status, ended, kept, spent} each
--          result   {source, spent, codec, data, at, fresh, gone}, or {}

if damaged then return refused() end

local found = record.at and content()
local answer = {now}
if record.kept_until > 0 then
  answer[2], answer[3], answer[4] = head_of(record), lines_of(record), {}
  if found then
    answer[4] = {found[1], found[2], found[3], found[4], record.at, record.fresh, record.gone}
  end
end
return answer
