-- Counts what there is. Changes nothing.
-- KEYS: clock, three streams, held, flight, later, since, order.
-- ARGV: a mark, whether it was sent before.
-- Answers: the mark; deliverable, deferred, in flight, dead; and for how long the oldest deliverable one has been so, or -1.
local now = look(KEYS[1])
if not now then
    return NEWER
end
local held, flight, later, since, order = KEYS[5], KEYS[6], KEYS[7], KEYS[8], KEYS[9]
local due = '(' .. string.format('%.0f', now)
local oldest
local function older(at)
    if at and at <= now and (not oldest or at < oldest) then
        oldest = at
    end
end
for _, waiting in ipairs({flight, later, since}) do
    older(tonumber(redis.call('ZRANGE', waiting, 0, 0, 'WITHSCORES')[2]))
end
local total = 0
for p = 0, 2 do
    local stream = KEYS[2 + p]
    total = total + redis.call('XLEN', stream)
    local last = '-'
    local groups = redis.pcall('XINFO', 'GROUPS', stream)
    for _, group in ipairs(groups.err and {} or groups) do
        local told = {}
        for at = 1, #group, 2 do
            told[group[at]] = group[at + 1]
        end
        if told.name == GROUP then
            last = '(' .. told['last-delivered-id']
        end
    end
    -- The first that was never handed out and waits for no delay.
    for _ = 1, 1000 do
        local entry = redis.call('XRANGE', stream, last, '+', 'COUNT', 1)[1]
        if not entry then
            break
        end
        if redis.call('HEXISTS', held, p .. ':' .. entry[1]) == 0 then
            older(tonumber(string.match(entry[1], '^%d+')))
            break
        end
        last = '(' .. entry[1]
    end
end
local deferred, in_flight = redis.call('ZCOUNT', later, due, '+inf'), redis.call('ZCOUNT', flight, due, '+inf')
local ready = math.max(total - deferred - in_flight, 0)
return {ARGV[1], ready, deferred, in_flight, redis.call('ZCARD', order), ready > 0 and oldest and now - oldest or -1}
