-- The schema of a taskonce store, version 1. A later version is a further step, never a change of this file.

-- One row a task. The columns decide: token, fence, state and output are what they say here; the body has the rest.
-- No check constraints: the server reads each again for every row that is written. What is not a record is found when it is
-- read, and a purge takes only what is final.
create table {schema}.task (
    key              text collate "C" primary key,  -- namespace/handler@version/id
    state            smallint    not null,          -- 1 running, 2 waiting, 3 done, 4 dead, 5 parked
    token            uuid        not null,          -- moves on every write; the next write names it
    claim            uuid        not null,          -- the claim that wrote the record last as its holder
    fence            bigint      not null,          -- orders claims
    attempt          integer     not null,
    owner            text        not null,
    effect           smallint    not null,          -- 1 transactional, 2 keyed, 3 fenced, 4 unrepeatable, 5 repeatable
    retention        bigint      not null,          -- milliseconds that the record stays when it is final
    output_retention bigint      not null,          -- milliseconds that its output stays
    written_at       timestamptz not null,          -- the last write, by the server's clock
    expires_at       timestamptz,                   -- of done and dead: from then on a purge removes the record
    output_until     timestamptz,                   -- of done with an output: from then on the output is gone
    output_type      text,                          -- what the output is, such as application/json
    output           bytea,
    body             bytea       not null           -- the whole record but its output, as the codec writes it
) with (
    -- Room in each page for a next version of all its rows, so that heartbeats touch no index, also many in one statement.
    fillfactor = 50,
    -- Every task leaves a dead version of its row; they are few bytes, and go before they are many.
    autovacuum_vacuum_scale_factor = 0.02,
    autovacuum_vacuum_insert_scale_factor = 0.1,
    autovacuum_analyze_scale_factor = 0.05
);

-- What people list. Done is left out, since nearly all records are done.
create index task_open on {schema}.task (key) where state <> 3;
-- What a purge looks for, oldest first.
create index task_expires on {schema}.task (expires_at) where expires_at is not null;
create index task_output on {schema}.task (output_until) where output_until is not null;

-- One sequence for all tasks, so that fences order the claims of different tasks too, and survive a purge.
create sequence {schema}.fence as bigint;

-- One row: what belongs to the store as a whole.
create table {schema}.meta (
    one_row boolean primary key default true check (one_row),
    version integer not null,                       -- the steps of the schema that were taken
    born    uuid    not null default gen_random_uuid()
);
insert into {schema}.meta (version) values (0);

-- For people and for programs of other languages.
create view {schema}.tasks as
select split_part(key, '/', 1) as namespace,
       split_part(split_part(key, '/', 2), '@', 1) as handler,
       split_part(split_part(key, '/', 2), '@', 2) as version,
       substr(key, length(split_part(key, '/', 1)) + length(split_part(key, '/', 2)) + 3) as id,
       key,
       case state when 1 then 'running' when 2 then 'waiting' when 3 then 'done' when 4 then 'dead' when 5 then 'parked' end as state,
       case effect when 1 then 'transactional' when 2 then 'keyed' when 3 then 'fenced' when 4 then 'unrepeatable'
                   when 5 then 'repeatable' end as effect,
       owner,
       attempt,
       fence,
       claim,
       token,
       clock_timestamp() - written_at as age,
       written_at,
       expires_at,
       output_until,
       output_type,
       case when output_until <= clock_timestamp() then null else output end as output
from {schema}.task;
