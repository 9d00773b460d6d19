"""Streams: recorded chunk by chunk while the leader consumes them, and replayed to all others.

PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from types import AsyncGeneratorType
from typing import TYPE_CHECKING, Any, TypeAlias, overload

from idemguard import context
from idemguard.calls import Job
from idemguard.codec import Value
from idemguard.drive import Net
from idemguard.errors import ConfigurationError, ResultUnavailableError, StoreError
from idemguard.guard import Entry, Ran

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Generator
    from types import FrameType

    from idemguard.codec import Codec
    from idemguard.context import Current
    from idemguard.guard import Ask, Reply
    from idemguard.heart import Beat
    from idemguard.outcome import Outcome

STREAM = "stream"


class LeftError(Exception):
    """A stream was left before its end, so that there is nothing whole to keep."""


class Track(Sequence[Any]):  # noqa: PLW1641 - no hash, as a list
    """The chunks of a stream as they were recorded; each look at one gives a fresh object."""

    __slots__ = ("_codec", "_returned", "values")

    def __init__(self, codec: StreamCodec, values: tuple[Value, ...], returned: Value) -> None:
        self._codec = codec
        self.values = values
        self._returned = returned

    def __len__(self) -> int:
        return len(self.values)

    @overload
    def __getitem__(self, index: int) -> Any: ...

    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self._codec.chunk.load(value) for value in self.values[index]]
        return self._codec.chunk.load(self.values[index])

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, (list, Track)) else NotImplemented

    def __repr__(self) -> str:
        return f"<{len(self)} chunks of a stream>"

    @property
    def parts(self) -> tuple[Value, ...]:
        """All that is kept of it."""
        return (*self.values, self._returned)

    def returned(self) -> Any:
        """What it returned at its end."""
        return self._codec.returned.load(self._returned)


class StreamCodec:
    """Turns a recorded stream into bytes and back.

    Args:
        chunk: the codec of what it yields.
        returned: the codec of what it returns at its end.

    """

    def __init__(self, chunk: Codec, returned: Codec) -> None:
        self.chunk = chunk
        self.returned = returned

    def dump(self, stream: Track | list[Any], *, limit: int) -> Value:
        """A recorded stream, or a list of its chunks, as a store keeps it; never raises."""
        if not isinstance(stream, Track):
            if not isinstance(stream, (list, tuple)):
                return _unstorable("the result of a stream is given as the list of its chunks")
            recorder = Recorder(self, limit)
            for chunk in stream:
                recorder.add(chunk)
            stream = recorder.track(None)
        for part in stream.parts:
            if part.codec == "unstorable":
                return part
        if sum(len(part.data) for part in stream.parts) > limit:
            return _too_large(limit)
        parts = [[part.codec, part.data.decode()] for part in stream.parts]
        return Value(STREAM, json.dumps(parts).encode())

    def load(self, value: Value) -> Track:
        """A stored stream; its chunks are restored one by one, as they are consumed.

        Raises:
            StoreError: it is damaged, or no stream.
            ResultUnavailableError: it was executed, but could not be kept.

        """
        if value.codec == "unstorable":
            raise ResultUnavailableError(value.data.decode(errors="replace"))
        try:
            if value.codec != STREAM:
                raise ValueError(value.codec)  # noqa: TRY301 - told below like all damage
            *chunks, returned = [
                Value(codec, data.encode()) for codec, data in json.loads(value.data)
            ]
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise StoreError(
                "what is kept is no stream, or damaged; forget() the task, or change version="
            ) from error
        return Track(self, tuple(chunks), returned)


def _unstorable(reason: str) -> Value:
    return Value("unstorable", reason.encode())


def _too_large(limit: int) -> Value:
    return _unstorable(f"the stream is larger than {limit} bytes; raise max_result_bytes=")


class Recorder:
    """Takes down what a stream yields, as it was at that moment.

    Args:
        codec: of the stream.
        limit: bytes that are kept at most; beyond them nothing more is taken down.

    """

    def __init__(self, codec: StreamCodec, limit: int) -> None:
        self._codec = codec
        self._limit = limit
        self._left = limit
        self._chunks: list[Value] = []

    def add(self, chunk: object) -> None:
        """Take a chunk down."""
        if self._left < 0:
            return
        value = self._codec.chunk.dump(chunk, limit=self._limit)
        self._left -= len(value.data)
        if value.codec == "unstorable":
            self._left, self._chunks = -1, [value]
        elif self._left < 0:
            self._chunks = [_too_large(self._limit)]
        else:
            self._chunks.append(value)

    def track(self, returned: object) -> Track:
        """All of it, at the stream's end."""
        value = self._codec.returned.dump(returned, limit=self._limit)
        return Track(self._codec, tuple(self._chunks), value)


class _Run:
    """One call of a stream, from before its claim to after its end was told.

    Its consumer may go away, and Ctrl-C may hit, at any moment: the claim must not outlive it.

    Args:
        job: how it is guarded; its codec is a `StreamCodec`.
        ask: which task.
        body: makes the plain generator.

    """

    def __init__(self, job: Job, ask: Ask, body: Callable[[], Any]) -> None:
        self.job = job
        self.seen = job.engine.telemetry.call(ask)
        self.ask = ask = self.seen.ask
        self.net = Net()
        self._body = body
        self._inner: Any = None
        self._pid = os.getpid()
        self._recorder = Recorder(job.codec, job.engine.limit)
        self._seen: list[Any] | None = None if job.usage is None else []
        self._entry: Entry
        self._execution: Current
        self._beat: Beat | None = None
        self._stepping = False
        self._handed_over = False
        self._dropped: weakref.finalize[..., Any] | None = None
        context.coroutines.consumed(ask.nonce)

    # --- the beginning ---------------------------------------------------------------------------

    def kept(self, entry: Entry | Reply) -> Track | None:
        """What is replayed; None: it executes from now on."""
        if not isinstance(entry, Entry):
            return _track(self.job.end(self.seen, entry, hold=True))
        self._entry = entry
        self._execution, self._beat = self.job.start(self.seen, entry.claim, entry.asked)
        self.net.ran = Ran()  # from now on its line is kept
        _live(self)
        return None

    def outlast(self, loop: asyncio.AbstractEventLoop) -> None:
        """An async generator whose loop is closed is dropped without a word to it."""
        stop = partial(self.job.stop, self._execution, self._beat, None, LeftError())
        rest = self.job, self.net, stop, self._pid, partial(self.seen.left, LeftError())
        self._dropped = weakref.finalize(self, _dropped, loop, rest)
        self._dropped.atexit = False

    # --- one step: the only time that its execution is the current one ----------------------------

    def step(self) -> Any:
        """The next chunk."""
        self._here()
        with self.seen.inside(self._execution):
            if self._inner is None:
                self._inner = self._body()
            return next(self._inner)

    async def astep(self) -> Any:
        """The next chunk."""
        self._here()
        self._stepping = True
        with self.seen.inside(self._execution):
            if self._inner is None:
                self._inner = self._body()
                step = _first(self._inner)
            else:
                step = anext(self._inner)
            chunk = await step
        self._stepping = False
        return chunk

    def _here(self) -> None:
        if os.getpid() != self._pid:
            raise ConfigurationError(
                f"{self.job.task_type}: a guarded stream goes on in the process that began it, and "
                "not in one that was forked meanwhile; call it anew there"
            )
        context.coroutines.consumed(self.ask.nonce)

    def take(self, chunk: object) -> Any:
        """Take a chunk down before its consumer has it."""
        self._recorder.add(chunk)
        if self._seen is not None:
            self._seen.append(chunk)
        else:
            self._execution.yielded(chunk)
        return chunk

    # --- the end ---------------------------------------------------------------------------------

    def end(self, returned: object) -> None:
        """It was consumed whole."""
        if self._seen is None:
            self._execution.returned(returned)
        _track(
            self.job.tell(
                self.seen, self._entry, self._ran(self._recorder.track(returned)), self.net
            )
        )

    async def aend(self) -> None:
        """As `end`."""
        ran = self._ran(self._recorder.track(None))
        _track(await self.job.atell(self.seen, self._entry, ran, self.net))

    def fail(self, error: BaseException) -> None:
        """It raised, or was left."""
        amid = isinstance(error, GeneratorExit) and _amid()
        try:
            with self.seen.inside(self._execution), suppress(Exception):
                self._inner.close()  # its consumer is told of what ended it first
        finally:
            if self._forked():
                pass
            elif amid:
                self._handed_over = True
                context.coroutines.remove(self.ask.nonce)
                _aside(self._tell_aside, error)
            else:
                self._tell(error)

    def _tell(self, error: BaseException) -> None:
        ran = self._ran(None, error)
        _interrupted(self.job.tell(self.seen, self._entry, ran, self.net), ran)

    def _tell_aside(self, error: BaseException) -> None:
        try:
            self._tell(error)
        finally:
            self._handed_over = False
            self.leave()

    async def afail(self, error: BaseException) -> None:
        """As `fail`."""
        if isinstance(error, GeneratorExit) and self._stepping:
            return  # dropped while it awaited, it can await nothing more
        try:
            with self.seen.inside(self._execution), suppress(Exception):
                await self._inner.aclose()
        finally:
            if not self._forked():
                ran = self._ran(None, error)
                _interrupted(await self.job.atell(self.seen, self._entry, ran, self.net), ran)

    def _ran(self, track: Track | None, error: BaseException | None = None) -> Ran:
        if isinstance(error, GeneratorExit):  # in whatever way it was left, that is a failed call
            error = LeftError("the stream was left before its end")
        return self.job.stop(self._execution, self._beat, track, error, self._seen)

    def _forked(self) -> bool:
        """Whether this is a copy in a forked child: the claim is the parent's."""
        if os.getpid() == self._pid:
            return False
        self.net.claim = None
        return True

    def leave(self) -> None:
        """Whatever has happened, nothing is held any more."""
        if self._handed_over:
            return
        context.coroutines.remove(self.ask.nonce)
        _living.discard(self)
        if self._dropped is not None:
            self._dropped.detach()
        if self.net.claim is not None and not self._forked():
            self._give_back()
        self.seen.left(LeftError())
        self.net.ran = None  # an error's traceback holds this, and must not be held by it

    def _give_back(self) -> None:
        if self.net.ran is not None:
            self.net.ran = self._ran(None, GeneratorExit())
        _safely(self.net.give_back, self.job.engine.store, self.job.engine.backlog)


_Rest: TypeAlias = tuple[Job, Net, Callable[[], Ran], int, Callable[[], None]]


def _dropped(loop: asyncio.AbstractEventLoop, rest: _Rest) -> None:
    job, net, stop, pid, left = rest
    if net.claim is not None and loop.is_closed() and os.getpid() == pid:
        context.coroutines.remove(net.claim.nonce.partition(".")[0])
        net.ran = stop()
        _safely(net.give_back, job.engine.store, job.engine.backlog)
    _safely(left)


_living: weakref.WeakSet[_Run] = weakref.WeakSet()


_provided: weakref.WeakSet[Any] = weakref.WeakSet()


def _live(run: _Run) -> None:
    provider = run.job.engine.telemetry.provider
    with suppress(TypeError):  # it cannot be referred to weakly
        if (
            provider not in _provided
        ):  # what takes its span ends with the process, too: be before it
            _provided.add(provider)
            atexit.unregister(_leave_all)
            atexit.register(_leave_all)
    _living.add(run)


@atexit.register
def _leave_all() -> None:
    """With the process its streams end."""
    for run in list(_living):
        run.leave()


def stream(
    job: Job, ask: Ask, body: Callable[[], Generator[Any, Any, Any]]
) -> Generator[Any, Any, Any]:
    """One call of a generator function: claimed at its first step, kept when it was consumed whole.

    Args:
        job: how it is guarded; its codec is a `StreamCodec`.
        ask: which task.
        body: makes the plain generator.

    """
    run = _Run(job, ask, body)
    try:
        track = run.kept(job.enter(run.seen, run.net))
        if track is not None:
            for chunk in track:
                _refuse((yield chunk))
            return track.returned()
        try:
            while True:
                try:
                    chunk = run.step()
                except StopIteration as end:
                    returned = end.value
                    break
                _refuse((yield run.take(chunk)))
        except BaseException as error:
            run.fail(error)
            raise
        run.end(returned)
        return returned
    finally:
        run.leave()


async def astream(
    job: Job, ask: Ask, body: Callable[[], AsyncGenerator[Any, Any]]
) -> AsyncGenerator[Any, Any]:
    """One call of an async generator function, as `stream`."""
    run = _Run(job, ask, body)
    try:
        track = run.kept(await job.aenter(run.seen, run.net))
        if track is not None:
            for chunk in track:
                _refuse((yield chunk))
            return
        run.outlast(asyncio.get_running_loop())
        try:
            while True:
                try:
                    chunk = await run.astep()
                except StopAsyncIteration:
                    break
                _refuse((yield run.take(chunk)))
        except BaseException as error:
            await run.afail(error)
            raise
        await run.aend()
    finally:
        run.leave()


def _first(stream: AsyncGenerator[Any, Any]) -> Awaitable[Any]:
    """The first step of what is guarded; its loop is not told of it.

    A loop that ends closes all streams that it knows, at once: this one must be closed by the one
    around it, which then knows when that has come to its end.
    """
    if not isinstance(stream, AsyncGeneratorType):  # what it begins itself must be known
        return anext(stream)
    told = sys.get_asyncgen_hooks().firstiter
    sys.set_asyncgen_hooks(firstiter=None)
    try:
        return anext(stream)
    finally:
        sys.set_asyncgen_hooks(firstiter=told)


def _track(outcome: Outcome[Any]) -> Track:
    if outcome.error is not None:
        try:
            raise outcome.error
        finally:
            del outcome  # its traceback would hold this frame, and the frame the outcome
    assert isinstance(outcome.result, Track)
    return outcome.result


def _interrupted(outcome: Outcome[Any], ran: Ran) -> None:
    """Ctrl-C, or a cancellation, while a failure was told."""
    hit = outcome.error
    if hit is not ran.error and hit is not None and not isinstance(hit, Exception):
        raise hit


def _refuse(sent: object) -> None:
    if sent is not None:
        raise ConfigurationError(
            "a guarded stream takes no values: what is sent into it is no part of the task's "
            "identity; pass it as an argument"
        )


# --- closed by the garbage collector ---------------------------------------------------------------

_BODIES = {
    code.__code__
    for code in (Job._body, Job._abody, _Run.step, _Run.astep)  # noqa: SLF001 - our own
}
_LOCKING = ("idemguard.", "opentelemetry.sdk.", "opentelemetry.exporter.")
_LOCKLESS = {"idemguard.calls", "idemguard.spec", "idemguard.streams"}


def _amid() -> bool:
    """Whether this thread was interrupted in the midst of our own steps, and may hold a lock.

    The garbage collector, which may run anywhere, closes a stream that nobody has any more.
    """
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - there is no other way to tell
    while frame is not None and frame.f_code not in _BODIES:
        name = str(frame.f_globals.get("__name__"))
        if name.startswith(_LOCKING) and name not in _LOCKLESS:
            return True
        frame = frame.f_back
    return False


def _safely(act: Callable[..., None], *args: Any) -> None:
    if _amid():
        _aside(act, *args)
    else:
        act(*args)


def _aside(act: Callable[..., None], *args: Any) -> None:
    """In a thread of its own: it may have to wait until what was interrupted goes on."""
    inherited = copy_context()
    thread = threading.Thread(
        target=inherited.run, args=(act, *args), name="idemguard-left", daemon=True
    )
    with suppress(RuntimeError):  # the interpreter ends: the lease does it
        thread.start()
