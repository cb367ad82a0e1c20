-- The swap for servers before 7.0, which have neither `SET … NX GET` nor script flags: a claim (expected token empty)
-- goes through here too. See swap.lua for the arguments. PEXPIRE comes first because a script that has written may go
-- on when memory is full: a full memory must not undo finished work, while a new claim is refused.
if ARGV[1] == '' and ARGV[3] then
  if redis.call('SET', KEYS[1], ARGV[3], 'PX', ARGV[4], 'NX') then
    return ARGV[2]
  end
end
local token = redis.call('GETRANGE', KEYS[1], '2', '17')
if token == ARGV[1] and (token ~= '' or not ARGV[3]) then
  if ARGV[3] then
    redis.call('PEXPIRE', KEYS[1], ARGV[4])
    redis.call('SET', KEYS[1], ARGV[3], 'PX', ARGV[4])
  else
    redis.call('DEL', KEYS[1])
  end
  return ARGV[2]
end
if token == ARGV[2] then
  -- Written before: the touch makes a WAIT on this connection count it, which knows only the connection's own writes.
  local left = redis.call('PTTL', KEYS[1])
  if left > 0 then
    redis.call('PEXPIRE', KEYS[1], left)
  end
  return ARGV[2]
end
return {ARGV[2], redis.call('GET', KEYS[1]), redis.call('PTTL', KEYS[1])}
