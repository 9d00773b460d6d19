-- Pour counts together: out of the windows that are written to into one for each five minutes, and
-- of those, when they are old, into one for each hour.
--
-- KEYS[1]  windows that are written to: a hash of "start counter label" -> number
-- KEYS[2]  which windows there are: their names, by their start
-- KEYS[3]  where to: a hash of "counter label" -> number
-- KEYS[4]  ... windows to empty
-- ARGV[1]  name of the window that is poured to   ARGV[3] how long it lives, ms; "" = for ever
-- ARGV[2]  its start, ms                          ARGV[4] how long the windows' names live, ms
-- ARGV[5]  how many of the following are starts of windows that are written to
-- ARGV[6]  ... those starts, then the names of the windows to empty
-- returns  1

local starts, count = {}, tonumber(ARGV[5])
for number = 6, 5 + count do starts[ARGV[number]] = true end
local poured = false

local function pour(field, number)
  if number ~= '0' then
    redis.call('HINCRBY', KEYS[3], field, number)
    poured = true
  end
end

if count > 0 then
  local fields = redis.call('HGETALL', KEYS[1])
  for number = 1, #fields, 2 do
    local start, rest = string.match(fields[number], '^(%d+) (.*)$')
    if start and starts[start] then
      pour(rest, fields[number + 1])
      redis.call('HDEL', KEYS[1], fields[number])
    end
  end
end
for source = 4, #KEYS do
  local fields = redis.call('HGETALL', KEYS[source])
  for number = 1, #fields, 2 do pour(fields[number], fields[number + 1]) end
  redis.call('DEL', KEYS[source])
  redis.call('ZREM', KEYS[2], ARGV[6 + count + source - 4])
end
if poured then
  redis.call('ZADD', KEYS[2], ARGV[2], ARGV[1])
  for number, key in ipairs({KEYS[3], KEYS[2]}) do
    local life = ARGV[2 + number]
    if life == '' then
      redis.call('PERSIST', key)
    elseif number == 1 or redis.call('PTTL', key) < tonumber(life) then
      redis.call('PEXPIRE', key, life)
    end
  end
end
return 1
