"""Runs a task once however often parallel LLM agents pick it up, and counts what the duplicates had cost.

PYTEST_DONT_REWRITE
"""

from __future__ import annotations

from idemguard import errors
from idemguard.api import Task
from idemguard.context import agent, bypass, capture, current, record_usage, scope, worker
from idemguard.fingerprint import task_fingerprint
from idemguard.guard import OutOfScope
from idemguard.idempotent import Guard, configure, idempotent, run_task
from idemguard.ledger import ExecutionLedger, cumulative_input_tokens
from idemguard.outcome import Outcome
from idemguard.usage import Usage

__all__ = [
    "ExecutionLedger",
    "Guard",
    "OutOfScope",
    "Outcome",
    "Task",
    "Usage",
    "agent",
    "bypass",
    "capture",
    "configure",
    "cumulative_input_tokens",
    "current",
    "errors",
    "idempotent",
    "record_usage",
    "run_task",
    "scope",
    "task_fingerprint",
    "worker",
]
