"""An event consumer in Python, with SQL of its own by psycopg 3: each event takes effect once, in the transaction that
completes its task, though the queue delivers twice and workers are killed half way.

Run without arguments it plays the queue. For each delivery it starts

    taskonce run --key EVENT --effect transactional -- python3 event_consumer.py EVENT

which claims the event's task, keeps the claim alive, and starts this file again to handle the event: see `handle`.

It needs psycopg 3, the program `taskonce` (on the path, or named in TASKONCE), and a PostgreSQL database in which
`taskonce migrate` was run: DATABASE_URL names it to psycopg, TASKONCE_STORE to taskonce.
"""

import json
import os
import signal
import subprocess
import sys

import psycopg

# The statements of docs/postgres.md, word for word: psycopg's raw cursor takes `$1`.
LIMITS = """\
set local lock_timeout = '500ms';
set local idle_in_transaction_session_timeout = '30s'"""
LOCK = """\
select fence, attempt
from {schema}.task
where key = $1::text and claim = $2::uuid and state = 1
for update"""
COMPLETE = """\
update {schema}.task
set state = 3,
    token = gen_random_uuid(),
    output = $3::bytea,
    output_type = case when $3::bytea is null then null else $4::text end,
    written_at = clock_timestamp(),
    expires_at = clock_timestamp() + retention * interval '1 millisecond',
    output_until = case when $3::bytea is null then null else clock_timestamp() + output_retention * interval '1 millisecond' end
where key = $1::text and claim = $2::uuid and state = 1"""

# What a handler says that is to be killed.
HALF_WAY = "half way"


def connect():
    return psycopg.connect(os.environ["DATABASE_URL"], cursor_factory=psycopg.RawCursor)


def handle(event):
    """Handles one delivery, inside of `taskonce run`: lock the claim, have the effect, complete, commit."""
    key, claim = os.environ["TASKONCE_KEY"], os.environ["TASKONCE_CLAIM_ID"]
    schema = '"' + os.environ["TASKONCE_SCHEMA"] + '"'
    luck = os.environ.get("EXAMPLE_LUCK", "good")
    # Leaving the block commits; an exception rolls back, and the attempt has failed.
    with connect() as connection:
        connection.execute(LIMITS)
        locked = connection.execute(LOCK.replace("{schema}", schema), (key, claim)).fetchone()
        if locked is None:
            sys.exit("the claim is lost: another worker has the event")
        (_fence, attempt) = locked

        quantity = event["quantity"]
        connection.execute("update stock set level = level - $1 where item = $2", (quantity, event["item"]))
        connection.execute("insert into shipment (event, quantity) values ($1, $2)", (event["id"], quantity))
        if luck == "killed inside its transaction":
            wait_to_be_killed()

        output = json.dumps({"shipped": quantity, "attempt": attempt}).encode()
        done = connection.execute(COMPLETE.replace("{schema}", schema), (key, claim, output, "application/json"))
        if done.rowcount != 1:
            raise RuntimeError("the claim is lost, and nothing is committed")
    if luck == "killed behind its commit":
        wait_to_be_killed()
    print(f"ran, attempt {attempt}")


def wait_to_be_killed():
    print(HALF_WAY, flush=True)
    signal.pause()


def deliver(event, luck="good"):
    """What a queue does: hands the event to a worker, and says what became of it."""
    # The claim holds for 5 s, so that the example need not wait for long; the default is 30 s.
    words = [os.environ.get("TASKONCE", "taskonce"), "run", "--key", event["id"], "--effect", "transactional"]
    words += ["--lease", "5s", "--wait", "60s", "--", sys.executable, os.path.abspath(__file__), json.dumps(event)]
    environment = {**os.environ, "EXAMPLE_LUCK": luck}
    with open("worker.log", "a") as log:
        worker = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=log, text=True)
    said = worker.stdout.readline().strip()
    if said == HALF_WAY:
        # As `kill -9` does it; taskonce takes the handler with it.
        worker.kill()
        said = luck
    ended = worker.wait()
    if ended not in (0, -signal.SIGKILL):
        sys.exit(f"{event['id']}: taskonce ended with {ended}, and worker.log says why")
    with connect() as connection:
        level = connection.execute("select level from stock where item = 'apple'").fetchone()[0]
        shipments = connection.execute("select count(*) from shipment where event = $1", (event["id"],)).fetchone()[0]
    print(f"{event['id']}: {said}; {level} apples left, shipped {shipments} times")


def main():
    if len(sys.argv) == 2:
        return handle(json.loads(sys.argv[1]))
    with connect() as connection:
        connection.execute("create table stock (item text primary key, level int not null)")
        connection.execute("insert into stock values ('apple', 100)")
        # Only appended to: what is done twice shows.
        connection.execute("create table shipment (event text not null, quantity int not null)")

    first, second = ({"id": f"order-{number}", "item": "apple", "quantity": 10} for number in (1, 2))
    # Nothing of the first run is left: the second one does it all.
    deliver(first, luck="killed inside its transaction")
    deliver(first)
    deliver(first)
    # All of the first run is there: the second one is short, and handles nothing.
    deliver(second, luck="killed behind its commit")
    deliver(second)


main()

# Output:
# order-1: killed inside its transaction; 100 apples left, shipped 0 times
# order-1: ran, attempt 2; 90 apples left, shipped 1 times
# order-1: {"shipped": 10, "attempt": 2}; 90 apples left, shipped 1 times
# order-2: killed behind its commit; 80 apples left, shipped 1 times
# order-2: {"shipped": 10, "attempt": 1}; 80 apples left, shipped 1 times
