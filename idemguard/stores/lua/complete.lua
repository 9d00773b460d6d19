-- It ended with a value.
--
-- ARGV[5]  claim, as JSON   ARGV[8]  ttl, ms      ARGV[11] ago, ms
-- ARGV[6]  token            ARGV[9]  lease, ms    ARGV[12] codec
-- ARGV[7]  nonce            ARGV[10] spent        ARGV[13] data
-- returns  {"ended", kept, lost, runs, whom it hints at, now, spent}

if damaged then return refused() end

local ttl, lease = tonumber(ARGV[8]), tonumber(ARGV[9])
local line = find(ARGV[5], tonumber(ARGV[6]), ARGV[7])
if not line[ENDED] then
  local holds = owns(line)
  ended(line, 'ok', ARGV[10], tonumber(ARGV[11]), holds)
  if holds then
    keep(source(line), line[SPENT], ARGV[12], ARGV[13], now + ttl, now + math.max(ttl, lease))
  end
end
if changed then
  local outcome = 'executed'
  if line[CAUSE] == 'fallback' or line[CAUSE] == 'unguarded' then outcome = line[CAUSE] end
  book_lines(outcome)
  extend()
end
write()
return {
  'ended', line[KEPT] and 1 or 0, line[STATUS] == 'late' and 1 or 0, record.runs,
  hint(), now, line[SPENT],
}
