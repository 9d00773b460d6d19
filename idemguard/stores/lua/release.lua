-- It ended without a value.
--
-- ARGV[5]  claim, as JSON   ARGV[8]  status: failed, declined, lost
-- ARGV[6]  token            ARGV[9]  spent
-- ARGV[7]  nonce            ARGV[10] ago, ms
-- returns  {"ended", kept, lost, runs, whom it hints at, now, spent}

if damaged then return refused() end

local NEXT = {failed = 'retry', declined = 'declined', lost = 'lost'}
local line = find(ARGV[5], tonumber(ARGV[6]), ARGV[7])
if not line[ENDED] then
  ended(line, ARGV[8], ARGV[9], tonumber(ARGV[10]), false)
  if owns(line) then
    vacate(line)
    record.cause = NEXT[ARGV[8]]
  end
end
if changed then
  book_lines(ARGV[8] == 'declined' and 'declined' or 'failed')
  extend()
end
write()
return {
  'ended', line[KEPT] and 1 or 0, line[STATUS] == 'late' and 1 or 0, record.runs,
  hint(), now, line[SPENT],
}
