-- Queues a delivery.
-- KEYS: clock, three streams, held, later, once, order of nothing else.
-- ARGV: its coordinates, whether it was sent before, its priority's number, its delay, its key if it may be queued once, fields.
-- Answers: the coordinates sent, whether the queue is new, and the coordinates of what has its place, if it is queued already.
local now, _, is_new = clock(KEYS[1])
if not now then
    return NEWER
end
local streams = {KEYS[2], KEYS[3], KEYS[4]}
local coordinates, p, delay, key = ARGV[1], tonumber(ARGV[3]), tonumber(ARGV[4]), ARGV[5]
local stream = streams[p + 1]
if key ~= '' then
    local there = queued(streams, KEYS[7], key)
    if there == coordinates then
        return {coordinates, is_new}
    elseif there then
        return {coordinates, is_new, there}
    end
end
if ARGV[2] == '1' then
    -- Its first sending may have arrived: then it is among the newest.
    local last = '+'
    for _ = 1, 64 do
        local newest = redis.call('XREVRANGE', stream, last, '-', 'COUNT', 64)
        for _, entry in ipairs(newest) do
            if field(entry[2], 'taskonce:id') == coordinates then
                return {coordinates, is_new}
            end
        end
        if #newest < 64 then
            break
        end
        last = '(' .. newest[#newest][1]
    end
end
if is_new == 1 then
    begin(KEYS[1], now)
end
local fields = {}
for at = 6, #ARGV do
    fields[#fields + 1] = ARGV[at]
end
local id = add(stream, now, fields)
local member = p .. ':' .. id
if delay > 0 then
    redis.call('HSET', KEYS[5], member, '-:0:' .. key)
    redis.call('ZADD', KEYS[6], now + delay, member)
end
if key ~= '' then
    redis.call('HSET', KEYS[7], key, member .. ' ' .. coordinates)
end
return {coordinates, is_new}
