-- The schema of a taskonce store, version 1. A later version is a further step, never a change of this file.
--
-- Write to a live store only with SQLite 3.51.3 or newer: older ones can lose committed transactions.

-- One row a task.
CREATE TABLE task (
    id           INTEGER PRIMARY KEY,
    key          TEXT    NOT NULL UNIQUE,   -- namespace/handler@version/id
    state        INTEGER NOT NULL,          -- 1 running, 2 waiting, 3 done, 4 dead, 5 parked
    written_at   INTEGER NOT NULL,          -- milliseconds since 1970, by this host's clock
    expires_at   INTEGER,                   -- of done and dead: from then on a purge removes the record
    output_until INTEGER,                   -- of done with an output: from then on the output is gone
    body         BLOB    NOT NULL           -- the whole record, as the codec writes it; last, since an output may be long
) STRICT;

-- What people list. Done is left out, since nearly all records are done.
CREATE INDEX task_open ON task (key) WHERE state <> 3;
-- What a purge looks for, oldest first.
CREATE INDEX task_expires ON task (expires_at) WHERE expires_at IS NOT NULL;
CREATE INDEX task_output ON task (output_until) WHERE output_until IS NOT NULL;

-- One row: what belongs to the store as a whole.
CREATE TABLE store (
    only       INTEGER PRIMARY KEY CHECK (only = 1),
    fence      INTEGER NOT NULL,            -- the last fence given out; grows by each claim, also across purges
    claimed_at INTEGER NOT NULL,            -- when that was, in milliseconds since 1970
    probed_at  INTEGER NOT NULL             -- the last write of an examination
) STRICT;
INSERT INTO store VALUES (1, 0, 0, 0);

-- For people: `SELECT * FROM tasks`.
CREATE VIEW tasks AS
SELECT substr(key, 1, instr(key, '/') - 1) AS namespace,
       substr(rest, 1, instr(rest, '@') - 1) AS handler,
       substr(tail, 1, instr(tail, '/') - 1) AS version,
       substr(tail, instr(tail, '/') + 1) AS id,
       CASE state WHEN 1 THEN 'running' WHEN 2 THEN 'waiting' WHEN 3 THEN 'done' WHEN 4 THEN 'dead' WHEN 5 THEN 'parked' END AS state,
       datetime(written_at / 1000, 'unixepoch') AS written_at,
       datetime(expires_at / 1000, 'unixepoch') AS expires_at,
       datetime(output_until / 1000, 'unixepoch') AS output_until,
       length(body) AS bytes
FROM (SELECT *, substr(rest, instr(rest, '@') + 1) AS tail
      FROM (SELECT *, substr(key, instr(key, '/') + 1) AS rest FROM task));
