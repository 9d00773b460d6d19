-- The records whose open lines' leases are past.
--
-- KEYS[1]  open
-- ARGV[1]  now, ms; "" = the server's own clock
-- returns  {now, names}

local clock = redis.call('TIME')
local now = tonumber(ARGV[1]) or clock[1] * 1000 + math.floor(clock[2] / 1000)
return {now, redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', string.format('%.0f', now))}
