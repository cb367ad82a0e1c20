-- Publishes a dead letter again, or forgets it.
-- KEYS: clock, three streams, once, dead, graves, order.
-- ARGV: a mark, whether it was sent before, the verb, its id.
-- Answers: the mark, and 1 if it was there.
local now, server = clock(KEYS[1])
if not now then
    return NEWER
end
local streams, once, dead, graves, order = {KEYS[2], KEYS[3], KEYS[4]}, KEYS[5], KEYS[6], KEYS[7], KEYS[8]
local death = ARGV[4]
local line = redis.call('HGET', graves, death)
if not line then
    return {ARGV[1], 0}
end
local length, rest = string.match(line, '^(%d+):(.*)$')
local grave = string.sub(rest, 1, tonumber(length))
local entry = redis.call('XRANGE', dead, grave, grave)[1]
if ARGV[3] == 'redrive' and entry then
    local fields, p, key, coordinates = {}, 1, nil, ''
    for at = 1, #entry[2], 2 do
        local name, value = entry[2][at], entry[2][at + 1]
        if name == 'taskonce:dead-priority' then
            p = tonumber(value)
        elseif name == 'taskonce:id' then
            coordinates = value
        elseif string.lower(name) == 'idempotency-key' then
            key = key or value
        end
        local is_of_a_life_before = name == 'taskonce:once' or name == 'taskonce:redriven'
            or string.sub(name, 1, 14) == 'taskonce:dead-'
        if not is_of_a_life_before then
            fields[#fields + 1] = name
            fields[#fields + 1] = value
        end
    end
    fields[#fields + 1] = 'taskonce:redriven'
    fields[#fields + 1] = string.format('%.0f', server)
    local has_place = key and not queued(streams, once, key)
    if has_place then
        fields[#fields + 1] = 'taskonce:once'
        fields[#fields + 1] = '1'
    end
    local id = add(streams[p + 1], now, fields)
    if has_place then
        redis.call('HSET', once, key, p .. ':' .. id .. ' ' .. coordinates)
    end
end
redis.call('XDEL', dead, grave)
redis.call('HDEL', graves, death)
redis.call('ZREM', order, death)
return {ARGV[1], entry and 1 or 0}
