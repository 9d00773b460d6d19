-- Drop the result and every claim; the next call executes.
--
-- ARGV[5]  nonce of this order
-- returns  {"done", whom it hints at}

if record.ordered ~= ARGV[5] then
  changed = true
  tell_lost()
  drop_result(record)
  record.leader, record.fallback, record.cause, record.digest = false, false, 'forced', false
  record.settled, record.ordered = record.token, ARGV[5]
  book_lines()
  extend()
end
write()
return {'done', hint()}
