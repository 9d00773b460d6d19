"""What can go wrong, and what to do about it.

IdemguardError
├── ConfigurationError            an argument, an option or the environment cannot be used
├── FingerprintError              an argument has no stable identity
├── KeyConflictError              one idempotency key, two payloads
├── WaitTimeoutError              the leader took longer than `wait_timeout`
├── UnknownOutcomeError           an execution was lost: nobody knows whether its effect happened
├── LeaseLostError                this execution no longer holds its claim
├── ReentrantCallError            a call would wait for itself
├── ResultUnavailableError        executed, but its result could not be kept
└── StoreError                    the store answers, but wrongly (password, type, damage)
    └── StoreUnavailableError     the store does not answer
PYTEST_DONT_REWRITE
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "ConfigurationError",
    "FingerprintError",
    "IdemguardError",
    "KeyConflictError",
    "LeaseLostError",
    "ReentrantCallError",
    "ResultUnavailableError",
    "StoreError",
    "StoreUnavailableError",
    "UnknownOutcomeError",
    "WaitTimeoutError",
]


class IdemguardError(Exception):
    """The root of all errors that idemguard raises.

    Attributes:
        task_type: of the task that it is about, or None.
        fingerprint: of that task, 64 hex digits, or None.

    """

    def __init__(
        self, message: str = "", *, task_type: str | None = None, fingerprint: str | None = None
    ) -> None:
        super().__init__(message)
        self.task_type = task_type
        self.fingerprint = fingerprint

    def __reduce__(self) -> tuple[Any, ...]:
        # pickle would call the class with `args` alone and lose the keywords
        return _restore, (type(self), self.args, self.__dict__)


def _restore(
    kind: type[IdemguardError], args: tuple[Any, ...], state: dict[str, Any]
) -> IdemguardError:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(state)
    return error


class ConfigurationError(IdemguardError):
    """An argument, an option or the environment cannot be used; the message names it."""


class FingerprintError(IdemguardError):
    """An argument has no stable identity.

    Attributes:
        parameter: the name of the argument, or None where a payload has no parameters.
        path: where inside the payload, as in `doc.meta[3].client`.

    """

    def __init__(
        self,
        message: str = "",
        *,
        parameter: str | None = None,
        path: str = "",
        task_type: str | None = None,
        fingerprint: str | None = None,
    ) -> None:
        super().__init__(message, task_type=task_type, fingerprint=fingerprint)
        self.parameter = parameter
        self.path = path


class KeyConflictError(IdemguardError):
    """The same explicit idempotency key came with another payload."""


class _AboutHolderError(IdemguardError):
    """An error about somebody else's execution.

    Attributes:
        worker: who holds, or held, the claim, or None.
        execution_id: of that execution, or None.

    """

    def __init__(
        self,
        message: str = "",
        *,
        worker: str | None = None,
        execution_id: str | None = None,
        task_type: str | None = None,
        fingerprint: str | None = None,
    ) -> None:
        super().__init__(message, task_type=task_type, fingerprint=fingerprint)
        self.worker = worker
        self.execution_id = execution_id


class WaitTimeoutError(_AboutHolderError):
    """The leader took longer than this caller's `wait_timeout`."""


class UnknownOutcomeError(_AboutHolderError):
    """An execution was lost: nobody knows whether its effect happened.

    A body raises it as well, to say that it does not know this of itself:
    its claim then counts as lost instead of released.
    """


class LeaseLostError(_AboutHolderError):
    """This execution no longer holds its claim: its result will not be kept."""


class ReentrantCallError(IdemguardError):
    """A call would wait for an execution that can only go on once the call has returned."""


class ResultUnavailableError(_AboutHolderError):
    """The task was executed, but its result could not be kept; it is not executed again."""


class StoreError(IdemguardError):
    """The store answers, but not with what was asked: the message has its words."""


class StoreUnavailableError(StoreError):
    """The store does not answer: it is down, out of reach, or busy for too long."""
