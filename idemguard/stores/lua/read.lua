-- Several records, without their results.
--
-- KEYS     records
-- ARGV[1]  now, ms; "" = the server's own clock
-- returns  for each {head, lines} as look.lua has them, {} where there is none, "DAMAGED" where it
--          cannot be read

local answer = {}
for number, key in ipairs(KEYS) do
  local stands = redis.call('GET', key)
  local one = stands and unpacked(stands)
  if stands and not one then
    answer[number] = 'DAMAGED'
  elseif one and one.kept_until > now then
    answer[number] = {head_of(one), lines_of(one)}
  else
    answer[number] = {}
  end
end
return answer
