"""Streams: recorded chunk by chunk while the leader consumes them, and replayed to all others."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from idemguard import context
from idemguard.codec import Value
from idemguard.errors import ConfigurationError, ResultUnavailableError, StoreError
from idemguard.guard import Entry

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Generator

    from idemguard.calls import Job
    from idemguard.codec import Codec
    from idemguard.guard import Ask
    from idemguard.outcome import Outcome

STREAM = "stream"


class LeftError(Exception):
    """A stream was left before its end, so that there is nothing whole to keep."""


@dataclass(frozen=True, slots=True)
class Track:
    """A stream as it was recorded: each chunk by itself, and what it returned."""

    chunks: tuple[Value, ...]
    returned: Value


class StreamCodec:
    """Turns a recorded stream into bytes and back.

    Args:
        chunk: the codec of what it yields.
        returned: the codec of what it returns at its end.

    """

    def __init__(self, chunk: Codec, returned: Codec) -> None:
        self.chunk = chunk
        self.returned = returned

    def dump(self, track: Track, *, limit: int) -> Value:
        """A recorded stream as a store keeps it; never raises."""
        parts = [*track.chunks, track.returned]
        for part in parts:
            if part.codec == "unstorable":
                return part
        if sum(len(part.data) for part in parts) > limit:
            return _unstorable(f"the stream is larger than {limit} bytes; raise max_result_bytes=")
        return Value(STREAM, json.dumps([[p.codec, p.data.decode()] for p in parts]).encode())

    def seen(self, track: Track) -> list[Any]:
        """The chunks, as others will get them."""
        return [self.chunk.load(chunk) for chunk in track.chunks if chunk.codec != "unstorable"]

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
        except (ValueError, TypeError, AttributeError) as error:
            raise StoreError(
                "what is kept is no stream, or damaged; forget() the task, or change version="
            ) from error
        return Track(tuple(chunks), returned)


def _unstorable(reason: str) -> Value:
    return Value("unstorable", reason.encode())


class Recorder:
    """Takes down what a stream yields, as it was at that moment.

    Args:
        codec: of the stream.
        limit: bytes that are kept at most; beyond them nothing more is taken down.
        keeps: whether anything will be kept at all.

    """

    def __init__(self, codec: StreamCodec, limit: int, *, keeps: bool) -> None:
        self._codec = codec
        self._limit = limit
        self._keeps = keeps
        self._left = limit
        self._chunks: list[Value] = []

    def add(self, chunk: object) -> None:
        """Take a chunk down."""
        if not self._keeps or self._left < 0:
            return
        value = self._codec.chunk.dump(chunk, limit=self._limit)
        self._left -= len(value.data)
        if value.codec == "unstorable":
            self._left, self._chunks = -1, [value]
        elif self._left < 0:
            reason = f"the stream is larger than {self._limit} bytes; raise max_result_bytes="
            self._chunks = [_unstorable(reason)]
        else:
            self._chunks.append(value)

    def track(self, returned: object) -> Track:
        """All of it, at the stream's end."""
        value = self._codec.returned.dump(returned if self._keeps else None, limit=self._limit)
        return Track(tuple(self._chunks), value)


def stream(
    job: Job, ask: Ask, body: Callable[[], Generator[Any, Any, Any]]
) -> Generator[Any, Any, Any]:
    """One call of a generator function: claimed at its first step, kept when it was consumed whole.

    Args:
        job: how it is guarded; its codec is a `StreamCodec`.
        ask: which task.
        body: makes the plain generator.

    """
    context.coroutines.consumed(ask.nonce)
    entry = job.enter(ask)
    if not isinstance(entry, Entry):
        track = _track(job.end(ask, entry))
        for chunk in track.chunks:
            _refuse((yield job.codec.chunk.load(chunk)))
        return job.codec.returned.load(track.returned)
    recorder = _recorder(job, entry)
    execution, beat = job.start(entry.claim, entry.asked)
    inner, error, returned = None, None, None
    try:
        while True:
            context.coroutines.consumed(ask.nonce)
            with context.inside(execution):
                inner = body() if inner is None else inner
                try:
                    chunk = next(inner)
                except StopIteration as end:
                    returned = end.value
                    break
            recorder.add(chunk)
            _refuse((yield chunk))
    except BaseException as raised:  # noqa: BLE001 - what it means is decided in the flow
        error = raised
        with context.inside(execution):
            _close(inner)
    ran = job.stop(execution, beat, recorder.track(returned), _as_end(error))
    outcome = job.tell(entry, ran)
    if error is not None:
        raise error
    _track(outcome)
    return returned


async def astream(
    job: Job, ask: Ask, body: Callable[[], AsyncGenerator[Any, Any]]
) -> AsyncGenerator[Any, Any]:
    """One call of an async generator function, as `stream`."""
    context.coroutines.consumed(ask.nonce)
    entry = await job.aenter(ask)
    if not isinstance(entry, Entry):
        for chunk in _track(job.end(ask, entry)).chunks:
            _refuse((yield job.codec.chunk.load(chunk)))
        return
    recorder = _recorder(job, entry)
    execution, beat = job.start(entry.claim, entry.asked)
    inner, error = None, None
    try:
        while True:
            context.coroutines.consumed(ask.nonce)
            with context.inside(execution):
                inner = body() if inner is None else inner
                try:
                    chunk = await anext(inner)
                except StopAsyncIteration:
                    break
            recorder.add(chunk)
            _refuse((yield chunk))
    except BaseException as raised:  # noqa: BLE001 - what it means is decided in the flow
        error = raised
        with context.inside(execution):
            await _aclose(inner)
    ran = job.stop(execution, beat, recorder.track(None), _as_end(error))
    outcome = await job.atell(entry, ran)
    if error is not None:
        raise error
    _track(outcome)


def _recorder(job: Job, entry: Entry) -> Recorder:
    return Recorder(job.codec, job.engine.limit, keeps=entry.claim.holds)


def _track(outcome: Outcome[Any]) -> Track:
    if outcome.error is not None:
        raise outcome.error
    assert isinstance(outcome.result, Track)
    return outcome.result


def _as_end(error: BaseException | None) -> BaseException | None:
    """A stream that was left is a failed call, in whatever way it was left."""
    if isinstance(error, GeneratorExit):
        return LeftError("the stream was left before its end")
    return error


def _refuse(sent: object) -> None:
    if sent is not None:
        raise ConfigurationError(
            "a guarded stream takes no values: what is sent into it is no part of the task's "
            "identity; pass it as an argument"
        )


def _close(inner: Generator[Any, Any, Any] | None) -> None:
    if inner is not None:
        with suppress(Exception):  # its consumer is told of what ended it first
            inner.close()


async def _aclose(inner: AsyncGenerator[Any, Any] | None) -> None:
    if inner is not None:
        with suppress(Exception):  # its consumer is told of what ended it first
            await inner.aclose()
