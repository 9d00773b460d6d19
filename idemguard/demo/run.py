"""Three processes that start at the same moment and work their batches off.

PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from idemguard.context import record_usage
from idemguard.demo.documents import UnusableError, read, shown
from idemguard.demo.tasks import KINDS, PRICES, digest
from idemguard.errors import IdemguardError, StoreError
from idemguard.idempotent import Guard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from multiprocessing.connection import Connection

    from idemguard.demo.otlp import Export
    from idemguard.demo.plan import Call

LEASE = 5.0  # seconds: a worker that dies holds the others up for no longer
START = 20.0  # seconds that the workers have to get ready
SILENCE = 10.0  # seconds without a word from any of them, beside the delay, before they are ended
GRACE = 2.0  # seconds that a worker has to give its claim back when it is ended
HURRY = 0.5  # seconds of them for its spans


@dataclass(frozen=True, slots=True)
class Setting:
    """What every worker is told.

    Attributes:
        store: the URL that they share.
        namespace: of this pass.
        mode: `observe` or `enforce`.
        folder: of the documents.
        delay: seconds that a large model takes.
        signals: of OpenTelemetry, `traces` and `metrics`, that are sent to where the environment says.

    """

    store: str
    namespace: str
    mode: str
    folder: str
    delay: float
    signals: tuple[str, ...] = ()


@dataclass
class Came:
    """What a pass came to, beside what its ledger says.

    Attributes:
        done: calls that returned.
        died: what became of the workers that did not reach the end of their batch.
        failed: calls that raised, in words.
        arrived: the signals of which anything has arrived, from any worker.
        unsent: those of which nothing has arrived from some worker, and why.

    """

    done: int = 0
    died: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    arrived: set[str] = field(default_factory=set)
    unsent: dict[str, str] = field(default_factory=dict)


# --- in the worker's process -----------------------------------------------------------------------------


def work(line: Connection, name: str, setting: Setting, batch: Sequence[Call]) -> None:
    """Work a batch off, call by call, as soon as the word comes, and tell of every end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started this hears it, and ends this
    signal.signal(signal.SIGTERM, _leave)
    os.environ.pop("IDEMGUARD_MODE", None)  # the demo is about both modes
    export, unsent = _export(setting.signals)
    arrived: set[str] = set()
    guard = Guard(
        store=setting.store,
        namespace=setting.namespace,
        mode=setting.mode,
        lease=LEASE,
        pricer=PRICES,
        tracer_provider=None if export is None else export.tracers,
        meter_provider=None if export is None else export.meters,
    )
    try:
        guard.ledger.totals()  # opens the store
        line.send(("ready", ""))
        line.recv()
        for call in batch:
            line.send(_one(guard, name, setting, call))
        if export is not None:
            unsent, arrived, export = export.close(), export.arrived, None
        line.send(("end", json.dumps([sorted(arrived), unsent])))
    except StoreError as error:
        line.send(("broken", str(error)))
    except (EOFError, OSError):
        pass  # whoever started this is gone
    finally:
        guard.close()
        if export is not None:
            export.close(HURRY)


def _export(signals: Sequence[str]) -> tuple[Export | None, dict[str, str]]:
    """What sends the signals; or, where the environment's settings are none, why it cannot."""
    if not signals:
        return None, {}
    from idemguard.demo.otlp import Export  # noqa: PLC0415 - loads the SDK

    try:
        return Export(signals), {}
    except Exception as error:  # noqa: BLE001 - whatever it is, the demo goes on
        return None, dict.fromkeys(signals, str(error))


def _one(guard: Guard, name: str, setting: Setting, call: Call) -> tuple[str, str]:
    kind = KINDS[call.task_type]

    def body(payload: dict[str, str]) -> Any:
        found = digest(kind, read(Path(setting.folder, payload["document"])))
        time.sleep(kind.latency(setting.delay))  # stands in for the model
        record_usage(
            input_tokens=found.input_tokens, output_tokens=found.output_tokens, model=kind.model
        )
        return found.answer

    try:
        guard.run_task(call.task_type, {"document": call.document}, body, worker_id=name)
    except StoreError:
        raise
    except (UnusableError, IdemguardError) as error:
        return "failed", f"{call.task_type} of {shown(call.document)}: {error}"
    return "done", ""


def _leave(*_: object) -> None:
    raise SystemExit(0)  # so that the claim is given back


# --- in the process that starts them ---------------------------------------------------------------------


class _Worker:
    def __init__(self, name: str, setting: Setting, batch: Sequence[Call]) -> None:
        context = multiprocessing.get_context("spawn")
        self.name = name
        self.line, theirs = context.Pipe()
        self.process = context.Process(
            target=work, args=(theirs, name, setting, batch), name=name, daemon=True
        )
        self.process.start()
        theirs.close()  # so that its death is the end of the line

    def hear(self) -> tuple[str, str]:
        """Its next word; `gone` when it has died."""
        try:
            word: tuple[str, str] = self.line.recv()
        except (EOFError, OSError):
            return "gone", ""
        return word

    def go(self) -> None:
        """Tell it to start."""
        with suppress(OSError):  # then it has died, and will be heard of
            self.line.send(None)

    def fate(self) -> str:
        """How it died."""
        self.process.join(GRACE)
        code = self.process.exitcode
        if code is not None and code < 0:
            try:
                return f"{self.name} was killed ({signal.Signals(-code).name})"
            except ValueError:
                return f"{self.name} was killed (signal {-code})"
        return f"{self.name} ended before its batch did (exit code {code})"

    def close(self) -> None:
        """Forget about it."""
        self.line.close()
        self.process.close()


def race(
    batches: Sequence[Sequence[Call]], setting: Setting, told: Callable[[], None] = lambda: None
) -> Came:
    """Let a process work off each batch, all from the same moment on; no process is left behind.

    Args:
        batches: of calls.
        setting: what every worker is told.
        told: called whenever a call has ended.

    Raises:
        StoreError: the store cannot be used.

    """
    workers: list[_Worker] = []
    try:
        with _undisturbed():  # and so they stay: a Ctrl-C is for whoever started them
            for number, batch in enumerate(batches, 1):
                workers.append(_Worker(f"worker-{number}", setting, batch))
        came = Came()
        ready = _gather(workers, came)
        for worker in ready:
            worker.go()
        _follow(ready, came, told, SILENCE + LEASE + setting.delay)
        return came
    finally:
        with _undisturbed():
            _end(workers)


def _gather(workers: Sequence[_Worker], came: Came) -> list[_Worker]:
    """Wait until all are ready; those that are not in time, or have died, are left behind."""
    ready: list[_Worker] = []
    waiting = {worker.line: worker for worker in workers}
    until = time.monotonic() + START
    while waiting and (left := until - time.monotonic()) > 0:
        for line in wait(list(waiting), left):
            worker = waiting.pop(line)  # type: ignore[call-overload]
            word, about = worker.hear()
            if word == "broken":
                raise StoreError(about)
            if word == "ready":
                ready.append(worker)
            else:
                came.died.append(worker.fate())
    came.died += [f"{worker.name} was not ready within {START:g} s" for worker in waiting.values()]
    return ready


def _follow(
    workers: Sequence[_Worker], came: Came, told: Callable[[], None], patience: float
) -> None:
    """Hear of every call, until all have ended or died."""
    at_work = {worker.line: worker for worker in workers}
    through: set[str] = set()  # those with their batch behind them
    while at_work:
        heard = wait(list(at_work), patience)
        if not heard:
            names = " and ".join(worker.name for worker in at_work.values())
            came.died.append(f"{names} gave no sign of life for {patience:g} s")
            return
        for line in heard:
            worker = at_work[line]  # type: ignore[index]
            match worker.hear():
                case "done", _:
                    came.done += 1
                    told()
                case "failed", about:
                    came.failed.append(about)
                    told()
                case "broken", about:
                    raise StoreError(about)
                case "end", about:
                    through.add(worker.name)
                    arrived, unsent = json.loads(about)
                    came.arrived.update(arrived)
                    came.unsent.update(unsent)
                case _:
                    del at_work[line]  # type: ignore[arg-type]
                    if worker.name not in through:
                        came.died.append(worker.fate())


def _end(workers: Sequence[_Worker]) -> None:
    """End those that still run, gently at first."""
    for worker in workers:
        worker.process.terminate()
    until = time.monotonic() + GRACE
    for worker in workers:
        worker.process.join(max(0.0, until - time.monotonic()))
        worker.process.kill()
        worker.process.join()
        worker.close()


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Put a Ctrl-C off until the end; a process that is started in here never gets one."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    blocks = hasattr(signal, "pthread_sigmask")  # what a new process inherits
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT}) if blocks else None
    try:
        yield
    finally:
        if mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, handler)
    if came:
        raise KeyboardInterrupt
