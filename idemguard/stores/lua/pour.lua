-- Pour counts together: out of the windows that are written to into one for each five minutes, and
-- of those, when they are old, into one for each hour.
--
-- KEYS[1]  windows that are written to: a hash of "start counter label" -> number
-- KEYS[2]  which windows there are: their names, by their start
-- KEYS[3]  where to: a hash of label -> "counter number counter number ..."; of one counter, the
--          numbers add up
-- KEYS[4]  ... windows to empty
-- ARGV[1]  name of the window that is poured to   ARGV[3] how long it lives, ms; "" = for ever
-- ARGV[2]  its start, ms                          ARGV[4] how long the windows' names live, ms
-- ARGV[5]  how many of the following are starts of windows that are written to
-- ARGV[6]  ... those starts, then the names of the windows to empty
-- returns  1

local EXACT = 9007199254740992 -- 2^53: a script counts no further

local starts, count = {}, tonumber(ARGV[5])
for number = 6, 5 + count do starts[ARGV[number]] = true end

local sums, rests = {}, {} -- by label: by counter, a number's text; and what cannot be added here

local function pour(label, counter, number)
  local into = sums[label]
  if not into then
    into, rests[label] = {}, {}
    sums[label] = into
    for stands, amount in string.gmatch(redis.call('HGET', KEYS[3], label) or '', '(%S+) (%S+)') do
      pour(label, stands, amount)
    end
  end
  local old = into[counter]
  if not old then
    into[counter] = number
    return
  end
  local one, other = tonumber(old), tonumber(number)
  local sum = one + other
  if math.max(math.abs(one), math.abs(other), math.abs(sum)) < EXACT then
    into[counter] = string.format('%.0f', sum)
  else
    table.insert(rests[label], counter .. ' ' .. number)
  end
end

if count > 0 then
  local fields = redis.call('HGETALL', KEYS[1])
  for number = 1, #fields, 2 do
    local start, counter, label = string.match(fields[number], '^(%d+) (%S+) (.*)$')
    if start and starts[start] then
      pour(label, counter, fields[number + 1])
      redis.call('HDEL', KEYS[1], fields[number])
    end
  end
end
for source = 4, #KEYS do
  local fields = redis.call('HGETALL', KEYS[source])
  for number = 1, #fields, 2 do
    for counter, amount in string.gmatch(fields[number + 1], '(%S+) (%S+)') do
      pour(fields[number], counter, amount)
    end
  end
  redis.call('DEL', KEYS[source])
  redis.call('ZREM', KEYS[2], ARGV[6 + count + source - 4])
end

local poured = false
for label, into in pairs(sums) do
  local parts = rests[label]
  for counter, number in pairs(into) do
    if number ~= '0' and number ~= '-0' then table.insert(parts, counter .. ' ' .. number) end
  end
  if parts[1] then
    redis.call('HSET', KEYS[3], label, table.concat(parts, ' '))
    poured = true
  else
    redis.call('HDEL', KEYS[3], label)
  end
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
