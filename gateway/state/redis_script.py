"""The exchange as Redis carries it out: one script, so that nothing comes in between."""

from __future__ import annotations

KEYS = ("members", "infos", "buckets", "changed", "policy", "meta")
"""In the order in which the script takes them, each behind the prefix."""

EXCHANGE = """
local members, infos, buckets, changed, policy, meta = unpack(KEYS)
local ask = cjson.decode(ARGV[1])
local t = redis.call('TIME')
-- Milliseconds of Redis's own clock: those of gateways may differ.
local now = t[1] * 1000 + t[2] / 1000

local epoch = redis.call('HGET', meta, 'epoch')
if not epoch then
  epoch = ask.new_epoch
  redis.call('HSET', meta, 'epoch', epoch)
end
local same = ask.epoch == epoch

redis.call('ZADD', members, now + ask.ttl_ms, ask.id)
redis.call('HSET', infos, ask.id, ARGV[2])
for _, id in ipairs(redis.call('ZRANGEBYSCORE', members, '-inf', now)) do
  redis.call('ZREM', members, id)
  redis.call('HDEL', infos, id)
end

local function refilled(stored)
  local level, at, rate, capacity = string.match(stored, '^(%S+) (%S+) (%S+) (%S+)$')
  local gained = math.max(0, now - at) * rate
  return math.min(tonumber(capacity), level + gained)
end

for i = 3, #ARGV, 5 do
  local key, capacity, rate = ARGV[i], tonumber(ARGV[i + 1]), ARGV[i + 2]
  local spent, level = tonumber(ARGV[i + 3]), tonumber(ARGV[i + 4])
  local stored = redis.call('HGET', buckets, key)
  if stored then level = refilled(stored) end
  level = math.min(capacity, level) - spent
  local text = string.format('%.6f %.3f %s %.6f', level, now, rate, capacity)
  redis.call('HSET', buckets, key, text)
  redis.call('ZADD', changed, redis.call('HINCRBY', meta, 'seq', 1), key)
end

if ask.publish and redis.call('HGET', policy, 'text') ~= ask.publish then
  redis.call('HINCRBY', policy, 'version', 1)
  redis.call('HSET', policy, 'text', ask.publish)
end

local answer = { epoch, redis.call('HGET', meta, 'seq') or '0', '0', '' }
local version = tonumber(redis.call('HGET', policy, 'version') or '0')
if version > (same and ask.policy_version or 0) then
  answer[3], answer[4] = tostring(version), redis.call('HGET', policy, 'text')
end
local told = redis.call('HVALS', infos)
answer[5] = tostring(#told)
for _, info in ipairs(told) do answer[#answer + 1] = info end
local since = same and ask.since or 0
for _, key in ipairs(redis.call('ZRANGEBYSCORE', changed, '(' .. since, '+inf')) do
  local stored = redis.call('HGET', buckets, key)
  if stored then
    answer[#answer + 1] = key
    answer[#answer + 1] = string.format('%.6f', refilled(stored))
  end
end

-- What nobody touches for days is gone: longer than the slowest bucket takes to be full again.
for _, key in ipairs(KEYS) do redis.call('PEXPIRE', key, 172800000) end
return answer
"""

LEAVE = """
redis.call('ZREM', KEYS[1], ARGV[1])
redis.call('HDEL', KEYS[2], ARGV[1])
return 1
"""
