-- Make final what is lost where nobody else comes by.
--
-- returns  {"done", whom it hints at}

if damaged then return refused() end

tell_lost()
if changed then book_lines() end
write()
return {'done', hint()}
