-- How a record stands in its key: packed, behind a mark of its form and a
-- checksum. Absent is false, times are ms.
--
-- This part stands before every script that reads records.
--
-- ARGV[1]  now, ms; "" = the server's own clock

local FORM = 'idemguard1:'

-- the fields of a line
local TOKEN, NONCE, CAUSE, GENERATION, STARTED, HOLDS = 1, 2, 3, 4, 5, 6
local LABEL, WORKER, REST = 7, 8, 9
local UNTIL, STATUS, ENDED, KEPT, SPENT = 10, 11, 12, 13, 14

local clock = redis.call('TIME')
local now = tonumber(ARGV[1]) or clock[1] * 1000 + math.floor(clock[2] / 1000)

local function whole(number)
  return string.format('%.0f', number)
end

local function nothing()
  return {
    token = 0, leader = false, fallback = false, cause = 'first', generation = false, settled = 0,
    digest = false, runs = 0, reused = 0, ordered = false, kept_until = 0, made = false,
    at = false, fresh = false, gone = false, value = false,
    workers = {}, leavers = {}, owed = {}, indexed = true, lines = {},
  }
end

local SUM = 8 -- digits of a checksum: what somebody else, or a failing disk, wrote is not read

local function unpacked(text)
  local start = #FORM + SUM
  local body = string.sub(text, start + 1)
  if string.sub(text, 1, start) ~= FORM .. string.sub(redis.sha1hex(body), 1, SUM) then return nil end
  local f = cmsgpack.unpack(body)
  return {
    token = f[1], leader = f[2], fallback = f[3], cause = f[4], generation = f[5], settled = f[6],
    digest = f[7], runs = f[8], reused = f[9], ordered = f[10], kept_until = f[11], made = f[12],
    at = f[13], fresh = f[14], gone = f[15], value = f[16],
    workers = f[17], leavers = f[18], owed = f[19], indexed = f[20], lines = f[21],
  }
end

local function packed(r)
  local body = cmsgpack.pack({
    r.token, r.leader, r.fallback, r.cause, r.generation, r.settled,
    r.digest, r.runs, r.reused, r.ordered, r.kept_until, r.made,
    r.at, r.fresh, r.gone, r.value,
    r.workers, r.leavers, r.owed, r.indexed, r.lines,
  })
  return FORM .. string.sub(redis.sha1hex(body), 1, SUM) .. body
end

local ids = {} -- of lines that were asked for theirs

local function id(line)
  local name = ids[line]
  if not name then
    name = whole(line[TOKEN]) .. '-' .. line[NONCE]
    ids[line] = name
  end
  return name
end

-- a claim as JSON; names in it are JSON already
local function source(line)
  return '[' .. whole(line[TOKEN]) .. ',' .. cjson.encode(line[NONCE]) .. ',"' .. line[CAUSE]
    .. '",' .. whole(line[GENERATION]) .. ',' .. whole(line[STARTED]) .. ','
    .. (line[HOLDS] and 'true' or 'false') .. ',' .. line[LABEL] .. ',' .. line[WORKER] .. ','
    .. (line[REST] == '' and 'null' or line[REST]) .. ']'
end
