-- Keep a result that somebody knows; what was lost is unknown no longer.
--
-- ARGV[5]  nonce of this order   ARGV[8]  rest of caller   ARGV[11] data
-- ARGV[6]  label                 ARGV[9]  ttl, ms
-- ARGV[7]  worker                ARGV[10] codec
-- returns  {"done", whom it hints at}
--          {"replay", source, spent, codec, data, at, fresh, gone, runs, whom it hints at}

if damaged then return refused() end

local nonce = ARGV[5]
if record.ordered ~= nonce then
  local found = record.at and now < record.fresh and content()
  if found then
    return {
      'replay', found[1], found[2], found[3], found[4],
      record.at, record.fresh, record.gone, record.runs, hint(),
    }
  end
  local token = math.max(record.token + 1, now)
  local claim = {token, nonce, 'forced', token, now, false, ARGV[6], ARGV[7], ARGV[8]}
  tell_lost()
  record.token, record.ordered = token, nonce
  local gone = now + tonumber(ARGV[9])
  keep(source(claim), '', ARGV[10], ARGV[11], gone, gone)
  book_lines()
  extend()
end
write()
return {'done', hint()}
