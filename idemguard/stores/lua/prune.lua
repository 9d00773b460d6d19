-- Take out of the indexes what is over.
--
-- KEYS[1]  tasks   KEYS[2]  starts   KEYS[3]  open   KEYS[4] ... records
-- ARGV[1]  now, ms; "" = the server's own clock
-- ARGV[2]  ... for each record: its name, and its member of starts or ""
-- returns  how many members were over

local count = 0
for number = 4, #KEYS do
  local name, member = ARGV[2 * number - 6], ARGV[2 * number - 5]
  local stands = redis.call('GET', KEYS[number])
  local one = stands and unpacked(stands)
  if not stands or (one and one.kept_until > 0 and one.kept_until <= now) then
    redis.call('ZREM', KEYS[1], name)
    redis.call('ZREM', KEYS[3], name)
    if stands then redis.call('DEL', KEYS[number]) end
    count = count + 1
    if member ~= '' then redis.call('ZREM', KEYS[2], member) end
  elseif one and member ~= '' then
    local there = false
    for _, line in ipairs(one.lines) do there = there or name .. ' ' .. id(line) == member end
    if not there then
      redis.call('ZREM', KEYS[2], member)
      count = count + 1
    end
  end
end
return count
