#!lua flags=allow-oom
-- Replaces the record of one key if its token is still the expected one.
-- KEYS[1] key  ARGV[1] expected token  ARGV[2] next token (or a mark)  ARGV[3] next record, or nothing to erase it
-- ARGV[4] its life in milliseconds
-- Answers ARGV[2] when the write is stored, else {ARGV[2], what the key holds, PTTL}. ARGV[2] tells the caller that the
-- answer is its own. The token lies in bytes 3 to 18 of every record. A memory that is full must not undo finished work.
-- The range is given as text: numbers of Lua are printed as floating point, which took an eighth of the script's time.
local call, key, id = redis.call, KEYS[1], ARGV[2]
local token = call('GETRANGE', key, '2', '17')
if token == ARGV[1] then
  if ARGV[3] then
    call('SET', key, ARGV[3], 'PX', ARGV[4])
  else
    call('DEL', key)
  end
  return id
end
if token == id then
  -- Written before: the touch makes a WAIT on this connection count it, which knows only the connection's own writes.
  local left = call('PTTL', key)
  if left > 0 then
    call('PEXPIRE', key, left)
  end
  return id
end
return {id, call('GET', key), call('PTTL', key)}
