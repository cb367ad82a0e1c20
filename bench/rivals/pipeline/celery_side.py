"""Celery as an at-least-once worker: acknowledged late, given back when a child dies, results kept.

`celery_side.py fill COUNT` queues empty tasks; a worker of this module works them off.
"""

import os
import sys

from celery import Celery

URL = os.environ["RIVAL_REDIS"]
app = Celery("rival", broker=URL, backend=URL)
app.conf.update(
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    # As many as run elsewhere, so that no round trip is waited for.
    worker_prefetch_multiplier=32,
    task_serializer="json",
    worker_hijack_root_logger=False,
    worker_send_task_events=False,
)


@app.task(name="empty")
def empty():
    return None


if __name__ == "__main__" and sys.argv[1] == "fill":
    with app.producer_pool.acquire() as producer:
        for _ in range(int(sys.argv[2])):
            empty.apply_async(producer=producer)
