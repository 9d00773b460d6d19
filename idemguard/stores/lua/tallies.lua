-- The counts of windows, all of one moment.
--
-- KEYS[1]  windows that are written to   KEYS[2]  which windows there are   KEYS[3] ... windows
-- ARGV[1]  from which start   ARGV[2]  to which start, ms; names of windows that start there
-- ARGV[3]  ... the names that KEYS[3] ... stand for
-- returns  {{fields and numbers of KEYS[1]}, {names}, {fields and numbers}, ...}; the rest only
--          where the names are those that there are

local answer = {redis.call('HGETALL', KEYS[1])}
local names = redis.call('ZRANGEBYSCORE', KEYS[2], ARGV[1], ARGV[2])
answer[2] = names
if #names ~= #ARGV - 2 then return answer end
for number, name in ipairs(names) do
  if name ~= ARGV[number + 2] then return answer end
end
for number = 3, #KEYS do answer[number] = redis.call('HGETALL', KEYS[number]) end
return answer
