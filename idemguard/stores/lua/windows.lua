-- What a command adds to the windows, and all that is written; mirrors windows.py.
--
-- This part stands between record.lua and every command's own.

local DUPLICATES = {lost = true, fallback = true, observed = true, unguarded = true}
local TOKENS = {'input', 'output', 'cache_read', 'cache_write', 'reasoning'}
local BESIDE = {
  'cost_input', 'cost_cache_read', 'cost_cache_write', 'inner_input', 'inner_output', 'inner_cost',
}
local NAMESPACES_LIVE = '34560000000' -- 400 days after a process has begun to write

local booked = {}

local function book(time, label, counter, by)
  booked[#booked + 1] = {whole(time - time % SPAN) .. ' ' .. counter .. ' ' .. label, by}
end

local function start(line, earlier, by)
  book(line[STARTED], line[LABEL], 'cause_' .. line[CAUSE], by)
  if earlier == 0 then
    book(line[STARTED], line[LABEL], 'tasks', by)
  elseif earlier == 1 then
    book(line[STARTED], line[LABEL], 'doubled', by)
  end
end

local function amount(time, label, counter, sign, number)
  if number and number ~= cjson.null and number ~= '0' then
    book(time, label, counter, sign .. number)
  end
end

-- kinds: how many of the tokens' kinds count
local function spend(time, label, spent, prefix, kinds, sign)
  local usage = spent[2]
  if usage ~= cjson.null then
    for number = 1, kinds do
      amount(time, label, prefix .. TOKENS[number], sign, usage[number])
    end
  end
  amount(time, label, prefix .. 'cost', sign, spent[5])
end

-- an execution counts as one of unknown usage from its start, until it tells
local function miss(time, label, spent, by)
  if spent[2] == cjson.null then
    book(time, label, spent[8] and 'nested' or 'unknown_usage', by)
  elseif spent[5] == cjson.null or (spent[11] or 0) > 0 then
    book(time, label, 'unpriced', by)
  end
end

local function spent_by(line, text, by, sign)
  local spent = spending(text)
  miss(line[STARTED], line[LABEL], spent, by)
  spend(line[STARTED], line[LABEL], spent, '', 5, sign)
  if DUPLICATES[line[CAUSE]] then spend(line[STARTED], line[LABEL], spent, 'wasted_', 4, sign) end
  if not spent[9] then return end
  for number, name in ipairs(BESIDE) do
    local amounts = spent[number <= 3 and 9 or 10]
    if amounts ~= cjson.null then
      amount(line[STARTED], line[LABEL], name, sign, amounts[(number - 1) % 3 + 1])
    end
  end
end

-- outcome: what a call came to whose execution ended in this step
local function book_lines(outcome)
  if not lined then return end
  local same, olds = {}, {}
  for _, line in ipairs(before.lines) do
    same[line], olds[id(line)] = true, line
  end
  for _, line in ipairs(record.lines) do
    if not same[line] then
      local old = olds[id(line)]
      if not old then start(line, before.runs, 1) end
      if not old or old[SPENT] ~= line[SPENT] then
        if old then spent_by(old, old[SPENT], -1, '-') end
        spent_by(line, line[SPENT], 1, '')
      end
      if line[STATUS] == 'lost' and not (old and old[STATUS] == 'lost') then
        book(line[STARTED], line[LABEL], 'lost', 1)
      end
      if line[ENDED] and not (old and old[ENDED]) then
        if line[STATUS] == 'failed' then book(line[STARTED], line[LABEL], 'failures', 1) end
        local RUN_TIMES = {
          10, 25, 50, 100, 250, 500, 1000, 2500, 5000, 10000, 20000, 30000, 60000,
          120000, 300000, 600000, 1800000, 3600000,
        }
        local bucket = 0
        while RUN_TIMES[bucket + 1] and RUN_TIMES[bucket + 1] < line[ENDED] - line[STARTED] do
          bucket = bucket + 1
        end
        book(line[STARTED], line[LABEL], 'run_' .. bucket, 1)
        local spent = spending(line[SPENT])
        if spent[2] ~= cjson.null then
          book(line[STARTED], line[LABEL], 'heard', 1)
        elseif not spent[8] and line[STATUS] ~= 'declined' then
          book(line[STARTED], line[LABEL], 'silent', 1)
        end
        if outcome then book(now, line[LABEL], 'call_' .. outcome, 1) end
      end
    end
  end
end

-- a key that others share lives a little longer than it must, so that few steps need to say so
local function live_on(key, life)
  if redis.call('PTTL', key) < life then redis.call('PEXPIRE', key, whole(life * 1.125 + slack)) end
end

-- a record outlives its last command by its retention, and whatever it still has to tell
local function extend()
  local last = math.max(now + tonumber(ARGV[4]), record.kept_until)
  for _, line in ipairs(record.lines) do
    if line[STATUS] == 'open' then last = math.max(last, line[UNTIL]) end
  end
  if record.at then last = math.max(last, record.gone) end
  record.kept_until = last
end

local function index(life)
  if not lined and record.made and record.indexed then
    live_on(KEYS[4], life)
    if record.lines[1] then live_on(KEYS[5], life) end
    return
  end
  local there, due = {}, false
  for _, line in ipairs(record.lines) do
    local name = id(line)
    there[name] = true
    if line[STATUS] == 'open' then due = math.min(due or line[UNTIL], line[UNTIL]) end
  end
  local known, was_open = {}, false
  for _, line in ipairs(before.lines) do
    local name = id(line)
    known[name] = true
    was_open = was_open or line[STATUS] == 'open'
    if not there[name] then redis.call('ZREM', KEYS[5], task .. ' ' .. name) end
  end
  for _, line in ipairs(over) do redis.call('ZREM', KEYS[5], task .. ' ' .. id(line)) end
  for _, entry in ipairs(record.owed) do
    if not entry[2] then redis.call('ZREM', KEYS[5], task .. ' ' .. entry[1]) end
  end
  for _, line in ipairs(record.lines) do
    local name = id(line)
    if not known[name] or not record.indexed then
      redis.call('ZADD', KEYS[5], whole(line[STARTED]), task .. ' ' .. name)
    end
  end
  if due then
    redis.call('ZADD', KEYS[6], whole(due), task)
    live_on(KEYS[6], life)
  elseif was_open or not record.made or not record.indexed then
    redis.call('ZREM', KEYS[6], task)
  end
  if not record.made or not record.indexed then
    redis.call('ZADD', KEYS[4], 0, task)
  end
  live_on(KEYS[4], life)
  if record.lines[1] then live_on(KEYS[5], life) end
end

local function write_windows()
  for _, entry in ipairs(booked) do
    redis.call('HINCRBY', KEYS[3], entry[1], type(entry[2]) == 'number' and whole(entry[2]) or entry[2])
  end
  if #booked > 0 then live_on(KEYS[3], WINDOWS_LIVE) end
end

-- a step that must not touch the other keys leaves in the record what they are owed: counts, and
-- the names of the lines that are no longer there
local function owe()
  local function add(entry)
    if #record.owed < OWED then record.owed[#record.owed + 1] = entry end
  end
  local there = {}
  for _, line in ipairs(record.lines) do there[id(line)] = true end
  for _, entry in ipairs(booked) do add(entry) end
  for _, lines in ipairs({over, before.lines}) do
    for _, line in ipairs(lines) do
      if not there[id(line)] then add({id(line), false}) end
    end
  end
  record.indexed = false
end

-- write all: the counts first, since a server that is full refuses the first of its writes
local function write()
  if KEYS[7] then
    redis.call('SADD', KEYS[7], string.match(KEYS[1], '{(.*):%x}:task:'))
    redis.call('PEXPIRE', KEYS[7], NAMESPACES_LIVE)
  end
  local behind = record.owed[1] or not record.indexed
  if not changed and #booked == 0 and not behind then return end
  if alone then
    owe()
    record.made = record.made or clock[1] * 1000000 + clock[2]
    if record.kept_until == 0 then record.kept_until = now + tonumber(ARGV[4]) end
    redis.call('SET', KEYS[1], packed(record), 'PX', whole(record.kept_until - now + slack))
    return
  end
  for _, entry in ipairs(record.owed) do
    if entry[2] then booked[#booked + 1] = entry end
  end
  write_windows()
  if not changed and not behind then return end
  local life = math.max(record.kept_until - now, 1)
  local value = record.value
  if value and value[3] ~= 'unstorable' then -- which a step on the record alone must know
    redis.call('HSET', KEYS[2], 'source', value[1], 'spent', value[2], 'codec', value[3], 'data', value[4])
    redis.call('PEXPIRE', KEYS[2], whole(math.max(record.gone - now, 1) + slack))
    record.value = false
  end
  index(life)
  record.made = record.made or clock[1] * 1000000 + clock[2]
  record.owed, record.indexed = {}, true
  redis.call('SET', KEYS[1], packed(record), 'PX', whole(life + slack))
  if before.at and not record.at then redis.call('DEL', KEYS[2]) end
end

-- whom a step hints at: all waiters, one of them, or nobody
local function wakes()
  if renewed then return 'all' end
  if #living() == 0 then return 'one' end
  if before.fallback and not record.fallback then return 'all' end
  return ''
end

local function publish(message)
  if ARGV[2] ~= '' then
    redis.pcall(ARGV[2], KEYS[1], message .. ' ' .. ARGV[3]) -- a hint may be lost
  end
end

local function hint()
  local whom = wakes()
  if whom ~= '' then publish(whom) end
  return whom
end
