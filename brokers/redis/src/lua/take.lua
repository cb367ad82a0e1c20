-- Hands out what is deliverable.
-- KEYS: clock, three streams, held, flight, later, back, since, what this call was given.
-- ARGV: where receipts begin, whether it was sent before, the most deliveries, the visibility timeout, after how many bytes it
-- is full, the newest format that the caller knows, for how long a newer one is put off, how long the last key lives.
-- Answers: where receipts begin, whether the queue is new, whether there may be more, when to look again, deliveries: each
-- its member, receipt, number and fields.
local now, _, is_new = clock(KEYS[1])
if not now then
    return NEWER
end
local held, flight, later, back, since, given = KEYS[5], KEYS[6], KEYS[7], KEYS[8], KEYS[9], KEYS[10]
local salt, max, visibility, bytes_max = ARGV[1], tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local format, newer_delay = tonumber(ARGV[6]), tonumber(ARGV[7])
local out, bytes, more = {}, 0, 0

-- When something comes due next, from now on.
local function next_due()
    local least = -1
    for _, waiting in ipairs({flight, later}) do
        local first = redis.call('ZRANGE', waiting, 0, 0, 'WITHSCORES')
        if first[2] then
            local left = math.max(tonumber(first[2]) - now, 0)
            if least < 0 or left < least then
                least = left
            end
        end
    end
    return least
end

if ARGV[2] == '1' then
    -- The answer to its first sending was lost: the same again, as far as it is still held so.
    for _, line in ipairs(redis.call('LRANGE', given, 0, -1)) do
        local member, receipt = string.match(line, '^(%S+) (.*)$')
        local state = redis.call('HGET', held, member)
        local holder, number = parts(state or '-:0:')
        if holder == receipt then
            local p, id = string.match(member, '^(%d):(.*)$')
            local entry = redis.call('XRANGE', KEYS[2 + p], id, id)[1]
            if entry then
                out[#out + 1] = {member, receipt, number, entry[2]}
            end
        end
    end
    if #out > 0 then
        return {salt, is_new, 1, 0, out}
    end
end

for _, waiting in ipairs({flight, later}) do
    local due = redis.call('ZRANGEBYSCORE', waiting, '-inf', now, 'WITHSCORES', 'LIMIT', 0, 1000)
    for at = 1, #due, 2 do
        redis.call('ZREM', waiting, due[at])
        redis.call('ZADD', back, 0, sortable(due[at]))
        redis.call('ZADD', since, due[at + 1], due[at])
    end
end

-- What an entry says of itself: its key if it may be queued once, its format, its size.
local function read(fields)
    local once, version, size = '', 1, 0
    for at = 1, #fields, 2 do
        local name = fields[at]
        size = size + #name + #fields[at + 1]
        if name == 'taskonce:once' then
            once = field(fields, 'idempotency-key') or ''
        elseif name == 'taskonce:v' then
            version = tonumber(fields[at + 1]) or 1
        end
    end
    return once, version, size
end

local function hand_out(p, id, fields, state)
    local member = p .. ':' .. id
    local once, version, size = read(fields)
    local _, number = parts(state or '-:0:')
    if version > format then
        redis.call('HSET', held, member, '-:' .. number .. ':' .. once)
        redis.call('ZADD', later, now + newer_delay, member)
        return
    end
    number = math.min(number + 1, 4294967295)
    local receipt = salt .. #out
    redis.call('HSET', held, member, receipt .. ':' .. string.format('%.0f', number) .. ':' .. once)
    redis.call('ZADD', flight, now + visibility, member)
    bytes = bytes + size
    out[#out + 1] = {member, receipt, number, fields}
end

-- Whether a group was missing, and is there now.
local function made_group(stream, answer)
    if not string.find(answer.err, 'NOGROUP', 1, true) or redis.call('EXISTS', stream) == 0 then
        return false
    end
    redis.call('XGROUP', 'CREATE', stream, GROUP, '0')
    return true
end

local function is_full()
    return #out >= max or bytes >= bytes_max
end

local looks = 0
for p = 0, 2 do
    local stream = KEYS[2 + p]
    -- What comes again was sent before what was never handed out.
    while not is_full() do
        local sorted = redis.call('ZRANGEBYLEX', back, '[' .. p .. ':', '(' .. p .. ';', 'LIMIT', 0, 1)[1]
        if not sorted then
            break
        end
        local member = plain(sorted)
        local id = string.sub(member, 3)
        local claimed = redis.pcall('XCLAIM', stream, GROUP, CONSUMER, 0, id, 'FORCE')
        if claimed.err then
            if redis.call('EXISTS', stream) == 0 then
                claimed = {}
            elseif made_group(stream, claimed) then
                claimed = redis.call('XCLAIM', stream, GROUP, CONSUMER, 0, id, 'FORCE')
            else
                return claimed
            end
        end
        redis.call('ZREM', back, sorted)
        redis.call('ZREM', since, member)
        if claimed[1] then
            hand_out(p, id, claimed[1][2], redis.call('HGET', held, member))
        else
            -- A hand has deleted it.
            redis.call('HDEL', held, member)
            redis.pcall('XACK', stream, GROUP, id)
        end
    end
    local step = 1
    while not is_full() and looks < 1000 do
        local answer =
            redis.pcall('XREADGROUP', 'GROUP', GROUP, CONSUMER, 'COUNT', step, 'STREAMS', stream, '>')
        if not answer then
            break
        elseif answer.err then
            if not made_group(stream, answer) then
                if redis.call('EXISTS', stream) == 0 then
                    break
                end
                return answer
            end
        else
            for _, entry in ipairs(answer[1][2]) do
                looks = looks + 1
                local member = p .. ':' .. entry[1]
                if redis.call('HEXISTS', held, member) == 1 then
                    -- It waits for its delay, or was handed out before its group was lost.
                elseif is_full() then
                    redis.call('HSET', held, member, '-:0:' .. read(entry[2]))
                    redis.call('ZADD', back, 0, sortable(member))
                    redis.call('ZADD', since, now, member)
                    more = 1
                else
                    hand_out(p, entry[1], entry[2])
                end
            end
            step = math.min(step * 2, 64, math.max(max - #out, 1))
        end
    end
end
if is_full() or looks >= 1000 then
    more = 1
end
if #out > 0 then
    if is_new == 1 then
        begin(KEYS[1], now)
    end
    local lines = {}
    for _, delivery in ipairs(out) do
        lines[#lines + 1] = delivery[1] .. ' ' .. delivery[2]
    end
    redis.call('RPUSH', given, unpack(lines))
    redis.call('PEXPIRE', given, ARGV[8])
end
return {salt, is_new, more, next_due(), out}
