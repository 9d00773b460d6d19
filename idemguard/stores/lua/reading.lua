-- How a record is told to those who only read; stands between form.lua and what reads.

local function head_of(r)
  return {
    r.token, r.leader or '', r.fallback or '', r.cause, r.generation or '', r.settled,
    r.digest or '', r.runs, r.reused, r.ordered and '=' .. r.ordered or '', r.kept_until,
    r.made or 0, r.workers, r.leavers,
  }
end

local function lines_of(r)
  local lines = {}
  for number, line in ipairs(r.lines) do
    lines[number] = {
      source(line), line[UNTIL], line[STATUS], line[ENDED] or '', line[KEPT] and 1 or 0, line[SPENT],
    }
  end
  return lines
end
