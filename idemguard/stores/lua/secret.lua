-- The namespace's secret, made at the first call.
--
-- KEYS[1]  secret
-- ARGV[1]  a fresh one   ARGV[2] how long it lives after its last use, ms
-- returns  the one that counts

redis.call('SET', KEYS[1], ARGV[1], 'NX')
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return redis.call('GET', KEYS[1])
