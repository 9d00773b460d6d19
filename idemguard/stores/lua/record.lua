-- The record that a command is about, and the small steps that commands are made of.
--
-- This part stands between form.lua and every command's own; it mirrors the small steps of claim.py.
--
-- KEYS[1]  record: its state and its lines, packed
-- KEYS[2]  result: a hash of source, spent, codec, data
-- KEYS[3]  windows: a hash of "start counter label" -> number
-- KEYS[4]  tasks: the records' names, in the order of their fingerprints
-- KEYS[5]  starts: "name id" of every line, by its start
-- KEYS[6]  open: the names of records with open lines, by the end of the lease that ends first
-- KEYS[7]  namespaces, where a process writes to one for the first time and there is no Cluster
--          Where the slot is moving there is KEYS[1] alone: then the step is done on the record,
--          and what the other keys are owed is left in it for the next one.
-- ARGV[1]  now, ms; "" = the server's own clock
-- ARGV[2]  how a hint is published: PUBLISH, SPUBLISH, or "" = not at all
-- ARGV[3]  who asks, so that they need not listen to their own hint
-- ARGV[4]  retention of the record, ms
-- returns  {what, ...}, as each command says; an error "DAMAGED ..." where the record cannot be read

local LINES, LEAVERS, WORKERS = 64, 8, 64
local OWED = 512
local WINDOWS_LIVE = 8 * 86400000
local SPAN = 300000

local slack = ARGV[1] == '' and 1000 or 3600000 -- a key ends by the server's clock, not by a test's
local alone = #KEYS == 1
local task = string.sub(KEYS[1], (string.find(KEYS[1], '}:task:', 1, true) or 0) + 7)

local function drop_result(r)
  r.at, r.fresh, r.gone, r.value = false, false, false, false
end

local over = {} -- the lines of a record that time has taken

-- without what time has taken from it
local function aged(r)
  if r.kept_until > 0 and r.kept_until <= now then
    local empty = nothing()
    empty.owed, over = r.owed, r.lines
    return empty
  end
  if r.at and r.gone <= now then drop_result(r) end
  return r
end

local function has(list, text)
  for _, other in ipairs(list) do
    if other == text then return true end
  end
  return false
end

local function copy(line)
  local new = {}
  for field = 1, SPENT do new[field] = line[field] end
  return new
end

local function lives(line)
  return line[STATUS] == 'open' and now < line[UNTIL]
end

local function told(line)
  if line[STATUS] == 'open' and line[UNTIL] <= now then return 'lost' end
  return line[STATUS]
end

local text = redis.call('GET', KEYS[1])
local record = text and unpacked(text)
local damaged = text and not record
record = record and aged(record) or nothing()

-- what the record was before the command; its lines are never changed, only replaced
local before = {
  runs = record.runs, fallback = record.fallback, at = record.at, lines = {}, leavers = {},
}
for number, line in ipairs(record.lines) do before.lines[number] = line end
for number, nonce in ipairs(record.leavers) do before.leavers[number] = nonce end

local changed = false -- whether there is anything to write
local lined = false -- whether its lines are others
local renewed = false -- whether there is another result

local function owns(line)
  if not line[HOLDS] then return false end
  local name = id(line)
  return name == record.leader or name == record.fallback
end

-- those to wait for: the leader first
local function living()
  local found = {}
  for _, line in ipairs(record.lines) do
    if owns(line) and lives(line) then
      if id(line) == record.leader then
        table.insert(found, 1, line)
      else
        found[#found + 1] = line
      end
    end
  end
  return found
end

local function is_done(line)
  if line[ENDED] then return true end
  return line[STATUS] == 'lost' and (not line[HOLDS] or line[TOKEN] <= record.settled)
end

-- write a line in its place, or as a new one, for which the oldest that are over make room
local function put(line)
  changed, lined = true, true
  for number, other in ipairs(record.lines) do
    if other[TOKEN] == line[TOKEN] and other[NONCE] == line[NONCE] then
      record.lines[number] = line
      return
    end
  end
  record.runs = record.runs + 1
  local spare = #record.lines + 1 - LINES
  if spare > 0 then
    local kept = {}
    for _, other in ipairs(record.lines) do
      if spare > 0 and is_done(other) then
        spare = spare - 1
        if not has(record.workers, other[WORKER]) then
          record.workers[#record.workers + 1] = other[WORKER]
        end
      else
        kept[#kept + 1] = other
      end
    end
    record.lines = kept
    while #record.workers > WORKERS do table.remove(record.workers, 1) end
  end
  record.lines[#record.lines + 1] = line
end

-- leave a place; a fallback whose leader leaves leads
local function vacate(line)
  local name = id(line)
  if name == record.leader then
    record.leader, record.fallback = record.fallback, false
  elseif name == record.fallback then
    record.fallback = false
  end
end

-- a result's source, spending, codec and data; false where they are gone, which makes the result
-- none, and where the step must not touch their key, "" in their place
local function content()
  if record.value then return record.value end
  if alone then return {'', '', '', ''} end
  local found = redis.call('HMGET', KEYS[2], 'source', 'spent', 'codec', 'data')
  if found[1] and found[2] and found[3] and found[4] then return found end
  drop_result(record) -- its key was evicted
  return false
end

-- what was spent, of its text: reports, usage, inputs, responses, cost, currency, version, nested,
-- and where there is any, the cost's parts, what guarded executions inside spent, unpriced reports
local NOTHING = {'0', cjson.null, {}, {}, cjson.null, cjson.null, cjson.null, false}

local function spending(text)
  return text == '' and NOTHING or cjson.decode(text)
end

local function refused()
  return redis.error_reply('DAMAGED the record of this task cannot be read')
end
