-- It still executes; this is what it has spent so far.
--
-- ARGV[5]  claim, as JSON   ARGV[8]  lease, ms
-- ARGV[6]  token            ARGV[9]  max_run, ms
-- ARGV[7]  nonce            ARGV[10] spent
-- returns  {"renewed", left, owns} | {"over"}

if damaged then return refused() end

local lease = tonumber(ARGV[8])
local line = find(ARGV[5], tonumber(ARGV[6]), ARGV[7])

local function renew()
  if line[ENDED] then return {'over'} end
  line[SPENT] = later(line[SPENT], ARGV[10])
  local till = math.min(now + lease, line[STARTED] + tonumber(ARGV[9]))
  if line[STATUS] == 'lost' or till <= now then
    put(line)
    return {'over'}
  end
  line[UNTIL] = math.max(line[UNTIL], till)
  put(line)
  return {'renewed', line[UNTIL] - now, owns(line) and 1 or 0}
end

local answer = renew()
if changed then
  book_lines()
  extend()
end
write()
if answer[1] == 'renewed' and id(line) == record.leader then
  publish('beat ' .. id(line) .. ' ' .. whole(line[UNTIL] - now)) -- who waits need not ask
else
  hint()
end
return answer
