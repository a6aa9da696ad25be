"""The exchange as Redis carries it out: one script, so that nothing comes in between."""

from __future__ import annotations

from prfaas.cluster_state import PREFIX_BATCHES, PREFIX_READ, PREFIX_TTL_S

KEYS = ("members", "infos", "buckets", "changed", "policy", "meta", "prefixes")
"""In the order in which the script takes them, each behind the prefix."""

_EXCHANGE = """
local members, infos, buckets, changed, policy, meta, prefixes = unpack(KEYS)
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

for i = 4, #ARGV, 5 do
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
-- Batches of prefixes: a log with numbers that leave out none, so that a gap is seen.
local newest = tonumber(redis.call('HGET', meta, 'prefixes') or '0')
if ARGV[3] ~= '' then
  newest = redis.call('HINCRBY', meta, 'prefixes', 1)
  local head = string.format('%.0f|%.0f|%s|', newest, now, ask.id)
  redis.call('ZADD', prefixes, newest, head .. ARGV[3])
  for _, old in ipairs(redis.call('ZRANGEBYSCORE', prefixes, '-inf', newest - BATCHES)) do
    redis.call('ZREM', prefixes, old)
  end
  redis.call('PEXPIRE', prefixes, PREFIX_TTL_MS)
end
local batches, upto, gap = {}, newest, '0'
if ask.prefixes_since then
  local from = same and ask.prefixes_since or 0
  if same and from < newest - BATCHES then gap = '1' end
  local found = redis.call(
    'ZRANGEBYSCORE', prefixes, '(' .. string.format('%.0f', from), '+inf', 'LIMIT', 0, READ)
  for _, batch in ipairs(found) do
    local seq, at, id = string.match(batch, '^(%d+)|(%d+)|([^|]*)|')
    if #found == READ then upto = tonumber(seq) or upto end
    if id and id ~= ask.id then
      batches[#batches + 1] = string.format('%.0f|', now - at) .. string.sub(batch, #seq + #at + 3)
    end
  end
end
answer[5], answer[6], answer[7] = string.format('%.0f', upto), gap, tostring(#batches)
for _, batch in ipairs(batches) do answer[#answer + 1] = batch end

local told = redis.call('HVALS', infos)
answer[#answer + 1] = tostring(#told)
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
for i = 1, 6 do redis.call('PEXPIRE', KEYS[i], 172800000) end
return answer
"""

EXCHANGE = (
    _EXCHANGE.replace("BATCHES", str(PREFIX_BATCHES))
    .replace("READ", str(PREFIX_READ))
    .replace("PREFIX_TTL_MS", str(int(PREFIX_TTL_S * 1000)))
)

LEAVE = """
redis.call('ZREM', KEYS[1], ARGV[1])
redis.call('HDEL', KEYS[2], ARGV[1])
return 1
"""
