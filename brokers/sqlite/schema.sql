-- The schema of a taskonce queue, version 1. A later version is a further step, never a change of this file.
--
-- Write to a live queue only with SQLite 3.51.3 or newer: older ones can lose committed transactions.

-- One row a delivery, dead letters included. What is acknowledged is deleted.
CREATE TABLE delivery (
    id           INTEGER PRIMARY KEY,       -- in the order of sending; never used twice
    handler      TEXT    NOT NULL,
    state        INTEGER NOT NULL,          -- 1 deliverable, 2 waits for due_at, 3 dead
    priority     INTEGER NOT NULL,          -- 0 high, 1 normal, 2 low
    due_at       INTEGER NOT NULL,          -- milliseconds since 1970, by this host's clock: deliverable then, or since then; dead since
    receipt      INTEGER,                   -- of whoever has it, or had it last; none when it was given back
    number       INTEGER NOT NULL,          -- how often it was handed out
    redriven_at  INTEGER,                   -- when a person last took it back from the dead letters
    sent_at      INTEGER,                   -- when its producer made it, if that is known
    key          TEXT,                      -- its idempotency key, if it has one
    entrance     TEXT,                      -- the same, where it may be queued once
    content_type TEXT,
    headers      TEXT,                      -- JSON: [["name", "value"], …]
    death_id     TEXT,                      -- of a dead letter: its id,
    reason       TEXT,                      -- why it died, in a word,
    message      TEXT,                      -- and for people
    size         INTEGER NOT NULL,          -- of the payload, in bytes
    payload      BLOB                       -- unless it is large: then in `large`, so that it is not written again at each change
) STRICT;

-- What is handed out next.
CREATE INDEX delivery_ready ON delivery (handler, priority, id) WHERE state = 1;
-- What becomes deliverable next.
CREATE INDEX delivery_due ON delivery (due_at) WHERE state = 2;
-- What may be queued once.
CREATE UNIQUE INDEX delivery_entrance ON delivery (handler, entrance) WHERE entrance IS NOT NULL;
-- Dead letters by their id, and in the order in which they are listed.
CREATE UNIQUE INDEX delivery_death ON delivery (death_id) WHERE death_id IS NOT NULL;
CREATE INDEX delivery_dead ON delivery (id) WHERE state = 3;

-- Payloads that are large.
CREATE TABLE large (
    id      INTEGER PRIMARY KEY,            -- of the delivery
    payload BLOB NOT NULL
) STRICT;

-- One row: what belongs to the queue as a whole.
CREATE TABLE queue (
    only     INTEGER PRIMARY KEY CHECK (only = 1),
    life     TEXT    NOT NULL,              -- names this file for ever: coordinates begin so
    last_id  INTEGER NOT NULL,              -- the last id given out
    clock_at INTEGER NOT NULL               -- about the latest time of this host's clock that was seen by a writer
) STRICT;
INSERT INTO queue VALUES (1, lower(hex(randomblob(16))), 0, 0);

-- For people: `SELECT * FROM deliveries`.
CREATE VIEW deliveries AS
SELECT id, handler, key,
       CASE WHEN state = 3 THEN 'dead' WHEN state = 1 OR due_at <= unixepoch('subsec') * 1000 THEN 'ready'
            WHEN receipt IS NULL THEN 'deferred' ELSE 'in flight' END AS state,
       CASE priority WHEN 0 THEN 'high' WHEN 1 THEN 'normal' ELSE 'low' END AS priority,
       datetime(due_at / 1000, 'unixepoch') AS due_at, number,
       datetime(sent_at / 1000, 'unixepoch') AS sent_at, size, reason, message
FROM delivery;
