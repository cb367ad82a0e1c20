-- Changes a list of tasks in a rare state: a sorted set of entries, each at the time when it ends, in milliseconds of this
-- server's clock. KEYS[1] list  ARGV[1] mark  then three by three: verb, entry, number
-- add: ends so many milliseconds from now   keep: the same, unless it ends later already   drop: remove it
-- drop_at: remove it if this is when it ends: one that was added again since stays
-- Answers ARGV[1], which tells the caller that the answer is its own. Numbers become text by hand, as Lua's own way
-- rounds them. Entries that have ended go, some at a time, and the list expires with its last one.
local ended_max = '100'  -- how many ended entries go at a time
local slack = 1000       -- how much later than its last entry a list may expire, so that not each heartbeat moves its end
local call, key = redis.call, KEYS[1]
local time = call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
for at = 2, #ARGV, 3 do
  local verb, entry, number = ARGV[at], ARGV[at + 1], ARGV[at + 2]
  if verb == 'add' then
    call('ZADD', key, string.format('%.0f', now + number), entry)
  elseif verb == 'keep' then
    call('ZADD', key, 'GT', string.format('%.0f', now + number), entry)
  elseif verb == 'drop' or tonumber(call('ZSCORE', key, entry)) == tonumber(number) then
    call('ZREM', key, entry)
  end
end
local ended = call('ZRANGEBYSCORE', key, '-inf', string.format('%.0f', now), 'LIMIT', '0', ended_max)
if #ended > 0 then
  call('ZREM', key, unpack(ended))
end
local last = call('ZRANGE', key, '-1', '-1', 'WITHSCORES')[2]
if last then
  local wanted, left = last - now, call('PTTL', key)
  if left < wanted or left > wanted + slack then
    call('PEXPIRE', key, string.format('%.0f', wanted + slack))
  end
end
return ARGV[1]
