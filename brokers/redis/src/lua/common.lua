-- What the scripts of a queue share. All keys of a call belong to one handler and lie in one slot.
--
-- A delivery is an entry of one of three streams, by its priority, from its sending until it is settled. A group of
-- consumers, `taskonce`, tells what was never handed out. What was, or waits for a delay, is in the hash `held`, under the
-- number of its stream and its id, as `receipt:number:key`: the key is there only where it may be queued once. It is then in
-- one of `flight` (by the end of its visibility timeout), `later` (by the end of its delay) and `back` (deliverable again, in
-- the order of sending; `since` tells since when).
local GROUP, CONSUMER = 'taskonce', 'worker'
local NEWER = redis.error_reply('NEWERLAYOUT a newer program has changed how this queue is kept')
-- A clock that is behind the last time seen by more than this went back, in milliseconds.
local BACK_MAX = 1000
-- The last time seen is written when it is older than this, in milliseconds.
local MARK_EVERY = 500
-- The most fields of an entry that are kept: what has more was not sent by us.
local FIELDS_MAX = 1000

-- The queue's clock in milliseconds, and the server's. The queue's is the server's, less what that went back: nothing waits
-- longer than it was told. Nothing where a newer program keeps this queue in another way.
local function look(key)
    local time = redis.call('TIME')
    local server = time[1] * 1000 + math.floor(time[2] / 1000)
    local kept = redis.call('HMGET', key, 'at', 'ahead', 'layout')
    if kept[3] and tonumber(kept[3]) > 1 then
        return nil
    end
    local at, ahead = tonumber(kept[1]), tonumber(kept[2]) or 0
    local now, behind = server + ahead, 0
    if at and now < at then
        if now < at - BACK_MAX then
            behind = at - now
        end
        now = at
    end
    return now, server, at, ahead + behind, behind > 0
end

-- The same, and notes it where there is something to note. Also says whether the queue is not there yet.
local function clock(key)
    local now, server, at, ahead, went_back = look(key)
    if not now then
        return nil
    end
    if went_back then
        redis.call('HSET', key, 'ahead', ahead)
    end
    if at and now >= at + MARK_EVERY then
        redis.call('HSET', key, 'at', now)
    end
    return now, server, at and 0 or 1
end

-- From now on the queue is there.
local function begin(key, now)
    redis.call('HSET', key, 'at', now, 'layout', 1)
end

-- A member in a form that sorts as the order of delivery does.
local function sortable(member)
    local p, ms, seq = string.match(member, '^(%d):(%d+)-(%d+)$')
    return p .. ':' .. string.rep('0', 20 - #ms) .. ms .. '-' .. string.rep('0', 20 - #seq) .. seq
end

local function plain(sorted)
    local p, ms, seq = string.match(sorted, '^(%d):0*(%d+)-0*(%d+)$')
    return p .. ':' .. ms .. '-' .. seq
end

local function parts(state)
    local receipt, number, once = string.match(state, '^([^:]*):(%d+):(.*)$')
    return receipt, tonumber(number) or 0, once or ''
end

local function field(fields, name)
    for at = 1, #fields, 2 do
        if string.lower(fields[at]) == name then
            return fields[at + 1]
        end
    end
end

-- Adds an entry at this time of the queue. Other producers may have used ids of their own.
local function add(stream, now, fields)
    local id = redis.pcall('XADD', stream, now .. NEXT_ID, unpack(fields))
    if type(id) == 'table' and id.err then
        id = redis.call('XADD', stream, '*', unpack(fields))
    end
    return id
end

-- Whether what has the place of a key at the entrance is still queued; else the place is free.
local function queued(streams, once, key)
    local place = redis.call('HGET', once, key)
    if not place then
        return nil
    end
    local p, id, coordinates = string.match(place, '^(%d):(%S+) (.*)$')
    if p and #redis.call('XRANGE', streams[p + 1], id, id) > 0 then
        return coordinates
    end
    return nil
end
