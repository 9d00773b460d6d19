"""A Celery app whose messages say in which namespace their tasks are to run.

A worker lives longer than a test, so its environment cannot say which test a task is of: the message does.
Outside of tests there is no such namespace, and nothing is sent.
"""

import os
from typing import Any

from celery import Celery, Task

from idemguard import configure, idempotent
from idemguard.context import namespace_override, use_namespace

HEADER = "idemguard_namespace"
BROKER = os.environ.get("DEMO_BROKER", "redis://localhost:6379/0")

configure(store=BROKER)


class NamespaceTask(Task):
    """Sends the caller's namespace along, and runs in it."""

    def apply_async(self, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        if (namespace := namespace_override()) is not None:
            options["headers"] = (options.get("headers") or {}) | {HEADER: namespace}
        return super().apply_async(args, kwargs, **options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with use_namespace(self.request.get(HEADER)):
            return super().__call__(*args, **kwargs)


app = Celery("demo", broker=BROKER, backend=BROKER, task_cls=NamespaceTask)


@idempotent(task_type="summarise")
def summarise(doc: str) -> str:
    return doc.upper()


@idempotent(task_type="translate", mode="observe")  # counts, and holds nothing back
def translate(doc: str) -> str:
    return doc[::-1]


@app.task
def work(doc: str) -> str:
    return summarise(doc)


@app.task
def careless(doc: str) -> str:
    return translate(doc)
