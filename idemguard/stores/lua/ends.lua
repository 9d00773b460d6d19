-- The line of a claim that a command carries, and its end.
--
-- This part stands between windows.lua and the commands that carry a claim.

-- one text is a larger whole number than another
local function exceeds(one, other)
  if #one ~= #other then return #one > #other end
  return one > other
end

-- of two spendings of one execution, the one of more reports
local function later(one, other)
  if one == other then return one end
  if exceeds(spending(one)[1], spending(other)[1]) then return one end
  return other
end

-- the line of the claim that a command carries; a flushed store has none: it is told anew, and
-- leads if nobody has held it since
local function find(claim_text, token, nonce)
  for _, line in ipairs(record.lines) do
    if line[TOKEN] == token and line[NONCE] == nonce then return copy(line) end
  end
  local claim = cjson.decode(claim_text)
  local line = {
    token, nonce, claim[1], claim[2], claim[3], claim[4], claim[5], claim[6], claim[7],
    now, 'open', false, false, '',
  }
  local leads = line[HOLDS] and record.cause == 'first' and not record.leader
    and not has(record.leavers, nonce)
  if line[HOLDS] and not leads then line[STATUS] = 'lost' end
  put(line)
  if record.token < token then record.token = token end
  if leads then
    record.leader = id(line)
    record.generation = record.generation or line[GENERATION]
  end
  return copy(line)
end

local function ended(line, status, spent, ago, kept)
  if line[STATUS] == 'lost' and status ~= 'lost' then status = 'late' end
  line[STATUS], line[KEPT] = status, kept
  line[ENDED] = math.max(now - ago, line[STARTED])
  line[SPENT] = later(line[SPENT], spent)
  put(line)
end
