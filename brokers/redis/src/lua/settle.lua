-- Settles a delivery by its receipt, or gives back what a call was given.
-- KEYS: clock, three streams, held, flight, later, back, since, once, wake, dead, graves, order, what a call was given.
-- ARGV: a mark, whether it was sent before, the verb, the member, its receipt, a number of milliseconds, and of a death: its
-- id, reason and message.
-- Answers: the mark, and 1 if it is so.
local now = clock(KEYS[1])
if not now then
    return NEWER
end
local held, flight, later, back, since = KEYS[5], KEYS[6], KEYS[7], KEYS[8], KEYS[9]
local once, wake, dead, graves, order, given = KEYS[10], KEYS[11], KEYS[12], KEYS[13], KEYS[14], KEYS[15]
local verb = ARGV[3]

local function leave(member)
    if redis.call('ZREM', flight, member) == 0 and redis.call('ZREM', later, member) == 0 then
        redis.call('ZREM', back, sortable(member))
        redis.call('ZREM', since, member)
    end
end

local function forget(stream, id, member, key)
    redis.pcall('XACK', stream, GROUP, id)
    redis.call('XDEL', stream, id)
    redis.call('HDEL', held, member)
    leave(member)
    if key ~= '' then
        local place = redis.call('HGET', once, key)
        if place and string.sub(place, 1, #member + 1) == member .. ' ' then
            redis.call('HDEL', once, key)
        end
    end
end

-- Wakes those who wait for what comes next.
local function poke()
    redis.call('SET', wake, '', 'PX', 60000)
end

local function come_due(waiting, member, at)
    redis.call('ZADD', waiting, at, member)
    if redis.call('ZRANGE', waiting, 0, 0)[1] == member then
        poke()
    end
end

local function give_back(member, number, key)
    leave(member)
    redis.call('HSET', held, member, '-:' .. string.format('%.0f', number) .. ':' .. key)
    redis.call('ZADD', back, 0, sortable(member))
    redis.call('ZADD', since, now, member)
end

if verb == 'give' then
    for _, line in ipairs(redis.call('LRANGE', given, 0, -1)) do
        local member, receipt = string.match(line, '^(%S+) (.*)$')
        local state = redis.call('HGET', held, member)
        local holder, number, key = parts(state or '-:0:')
        if holder == receipt then
            give_back(member, number, key)
        end
    end
    redis.call('DEL', given)
    poke()
    return {ARGV[1], 1}
end

local member, receipt, millis = ARGV[4], ARGV[5], tonumber(ARGV[6])
local state = redis.call('HGET', held, member)
local holder, number, key = parts(state or '-:0:')
if not state or holder ~= receipt then
    return {ARGV[1], 0}
end
local p, id = string.match(member, '^(%d):(.*)$')
local stream = KEYS[2 + p]
if verb == 'acknowledge' then
    forget(stream, id, member, key)
elseif verb == 'defer' and millis > 0 then
    leave(member)
    redis.call('HSET', held, member, '-:' .. string.format('%.0f', number) .. ':' .. key)
    come_due(later, member, now + millis)
elseif verb == 'defer' then
    give_back(member, number, key)
    poke()
elseif verb == 'extend' then
    leave(member)
    come_due(flight, member, now + millis)
elseif verb == 'die' then
    local death, reason, message = ARGV[7], ARGV[8], ARGV[9]
    local entry = redis.call('XRANGE', stream, id, id)[1]
    if entry and redis.call('HEXISTS', graves, death) == 0 then
        local fields, size = {}, 0
        for at = 1, math.min(#entry[2], FIELDS_MAX) do
            fields[at] = entry[2][at]
        end
        if not field(fields, 'taskonce:id') then
            fields[#fields + 1] = 'taskonce:id'
            fields[#fields + 1] = redis.sha1hex(stream .. '/' .. id)
        end
        for name, value in pairs({priority = p, number = string.format('%.0f', number), at = now}) do
            fields[#fields + 1] = 'taskonce:dead-' .. name
            fields[#fields + 1] = value
        end
        local grave = add(dead, now, fields)
        local line = ''
        local shown = {
            grave, string.format('%.0f', number), string.format('%.0f', now), #(field(fields, 'payload') or ''),
            field(fields, 'idempotency-key') and '+' .. field(fields, 'idempotency-key') or '', reason, message,
        }
        for _, text in ipairs(shown) do
            text = tostring(text)
            line = line .. #text .. ':' .. text
        end
        redis.call('HSET', graves, death, line)
        redis.call('ZADD', order, 0, death)
    end
    forget(stream, id, member, key)
end
return {ARGV[1], 1}
