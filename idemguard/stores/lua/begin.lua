-- May this call execute?
--
-- ARGV[5]  nonce            ARGV[10] mode: enforce, observe, bypass
-- ARGV[6]  label            ARGV[11] rerun_lost: 1 or 0
-- ARGV[7]  worker           ARGV[12] since, ms; ""
-- ARGV[8]  rest of caller   ARGV[13] beside: an id; ""
-- ARGV[9]  lease, ms        ARGV[14] digest: "=" and the text; ""
-- KEYS[8]  secret of the namespace, from a process that does not know it, with
-- ARGV[15] a fresh one      ARGV[16] how long it lives after its last use, ms; then it is also the
--          last part of what is returned
-- returns  {"claimed", source, runs, conflict, source of what was lost before it, or ""}
--          {"replay", source, spent, codec, data, at, fresh, gone, runs}
--          {"in_flight", source, left, since, runs} | {"unknown", source, runs}
--          {"conflict", runs} | {"over"}

if damaged then return refused() end

local nonce, lease, mode = ARGV[5], tonumber(ARGV[9]), ARGV[10]
local since, digest = tonumber(ARGV[12]), ARGV[14] ~= '' and ARGV[14]

-- a process that does not know the secret leaves it to the server to make digests with it
local secret

local function key_digests(text)
  local rest = cjson.decode(text)
  for _, pair in ipairs(rest[4]) do
    local raw = string.match(pair[2], '^%x+')
    if raw and #raw == 40 then
      local bytes = string.gsub(raw, '%x%x', function(two) return string.char(tonumber(two, 16)) end)
      pair[2] = string.sub(redis.sha1hex(secret .. bytes), 1, 8) .. string.sub(pair[2], 41)
    end
  end
  return cjson.encode(rest)
end

local rest = ARGV[8]
if KEYS[8] then
  redis.call('SET', KEYS[8], ARGV[15], 'NX')
  redis.call('PEXPIRE', KEYS[8], ARGV[16])
  secret = redis.call('GET', KEYS[8])
  rest = key_digests(rest)
end

local function other_payload()
  return record.digest and record.digest ~= digest
end

local function lost_before(line)
  local found
  for _, other in ipairs(record.lines) do
    local earlier = other[STATUS] == 'lost' and other[TOKEN] < line[TOKEN]
    if earlier and not (found and other[TOKEN] <= found[TOKEN]) then found = other end
  end
  return found and source(found) or ''
end

local function claimed(line)
  local conflict = line[CAUSE] == 'observed' and other_payload()
  local before = line[CAUSE] == 'lost' and lost_before(line) or ''
  return {'claimed', source(line), record.runs, conflict and 1 or 0, before}
end

local function open(cause, holds)
  local token = math.max(record.token + 1, now)
  local generation = record.generation
  if mode == 'bypass' or not generation then generation = token end
  local line = {
    token, nonce, cause, generation, now, holds, ARGV[6], ARGV[7], rest,
    now + lease, 'open', false, false, '',
  }
  put(line)
  record.token = token
  if holds then
    record.generation, record.digest = generation, digest
    if cause == 'fallback' then
      record.fallback = id(line)
    else
      record.leader = id(line)
    end
  end
  return claimed(line)
end

-- its reply was lost, or it came twice: the same claim, never a second one
local function again(line)
  if line[STATUS] ~= 'open' or (line[HOLDS] and not owns(line)) then return {'over'} end
  local mine = copy(line)
  mine[UNTIL] = math.max(line[UNTIL], now + lease)
  put(mine)
  return claimed(mine)
end

-- before somebody else starts: who holds a place and is dead is lost for good
local function clear_dead()
  local lines = {}
  for number, line in ipairs(record.lines) do lines[number] = line end
  for _, line in ipairs(lines) do
    if owns(line) and not lives(line) then
      local lost = copy(line)
      lost[STATUS] = 'lost'
      put(lost)
      vacate(lost)
      record.cause = 'lost'
    end
  end
end

local function unknown()
  for _, line in ipairs(record.lines) do
    if line[HOLDS] and told(line) == 'lost' and line[TOKEN] > record.settled then return line end
  end
end

local function replay(found)
  changed = true
  if found[3] == 'unstorable' then -- its caller gets an error
    book(now, ARGV[6], 'call_refused', 1)
  else
    record.reused = record.reused + 1
    book(now, ARGV[6], 'call_reused', 1)
    if found[2] ~= '' then spend(now, ARGV[6], spending(found[2]), 'saved_', 2, '') end
  end
  return {
    'replay', found[1], found[2], found[3], found[4],
    record.at, record.fresh, record.gone, record.runs,
  }
end

local function begin()
  if has(record.leavers, nonce) then return {'over'} end
  for _, line in ipairs(record.lines) do
    if line[NONCE] == nonce then return again(line) end
  end
  if mode == 'bypass' then return open('forced', false) end
  local found = record.at and (now < record.fresh or (since and since <= record.at)) and content()
  local alive = found and {} or living()
  if not found and not alive[1] then
    local lost = unknown()
    if lost and mode == 'enforce' and ARGV[11] == '0' then
      return {'unknown', source(lost), record.runs}
    end
    if record.generation and mode == 'enforce' and other_payload() then
      return {'conflict', record.runs} -- downstream it would go under one key
    end
    clear_dead()
    return open(record.cause, true)
  end
  if mode == 'observe' then return open('observed', false) end
  if other_payload() then return {'conflict', record.runs} end
  if found then return replay(found) end
  local holder = alive[1]
  if not alive[2] and id(holder) == ARGV[13] then
    clear_dead()
    return open('fallback', true)
  end
  if not since then book(now, ARGV[6], 'found', 1) end
  return {'in_flight', source(holder), holder[UNTIL] - now, since or now, record.runs}
end

local answer = begin()
if changed then
  book_lines()
  extend()
end
write()
if secret then answer[#answer + 1] = secret end
return answer
