"""Processes in which tasks are called plainly, whatever the test is that starts them."""

from __future__ import annotations

import multiprocessing
import os

import tasks

CODE = "from tasks import naive; naive('x')"  # for a sub-process
METHODS = {"forked": "fork", "spawned": "spawn"}


def process(kind):
    """A child that runs the task `naive`."""
    child = multiprocessing.get_context(METHODS[kind]).Process(target=tasks.naive, args=("x",))
    child.start()
    return child


def die():
    """A child that dies in the body of a task."""
    child = multiprocessing.get_context("fork").Process(target=_die)
    child.start()
    child.join()
    assert child.exitcode == 3


def _die():
    os.environ["DIES"] = ""
    tasks.dies()
