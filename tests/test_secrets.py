"""No payload, result or exception text goes out: not by spans, metrics, logs, nor by a store's keys."""

from __future__ import annotations

import asyncio
import base64
import enum
import gc
import json
import logging
import sqlite3
import threading
from contextlib import closing
from typing import Any
from urllib.parse import quote

import pydantic
import pytest
import redis
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader, MetricExportResult
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from servers.otlp import Receiver
from servers.server import HOST, free_port

from idemguard import OutOfScope, Task, bypass, capture, current, log, record_usage, scope
from idemguard.claim import Complete, Release
from idemguard.errors import (
    FingerprintError,
    KeyConflictError,
    LeaseLostError,
    ResultUnavailableError,
    StoreError,
    StoreUnavailableError,
    UnknownOutcomeError,
    WaitTimeoutError,
)
from idemguard.heart import PATIENT, heart_of
from idemguard.stores.redis import RedisStore
from idemguard.stores.sqlite import SqliteStore
from idemguard.telemetry import UsageSpanProcessor

LONG = 60.0
TYPE = "secretive"
# letters that no encoding leaves alone all together: one half is ASCII, the other has none of it
HALVES = ("Zq7Kv9Xw3pLmT4", "ЖщюЯйфЪэ")
SECRET = "".join(HALVES)


# --- what is looked for ------------------------------------------------------------------------------


def _forms(text: str) -> dict[str, bytes]:
    """A text in every dress that it may go out in; each is found wherever it begins."""
    found = {
        "JSON": json.dumps(text)[1:-1].encode(),
        "quoted": quote(text).encode(),
        "bytes as Python shows them": repr(text.encode())[2:-1].encode(),
    }
    for encoding in ("utf-8", "utf-16-le", "utf-16-be"):
        raw = text.encode(encoding)
        found[encoding] = raw
        found[f"hex of {encoding}"] = raw.hex().encode()
        for shift in range(3):  # what stands before it moves it within the groups of three
            shifted = base64.b64encode(bytes(shift) + raw)
            whole = shifted[4 if shift else 0 : -4]
            found[f"base64 of {encoding} + {shift}"] = whole
            found[f"url-safe base64 of {encoding} + {shift}"] = whole.translate(
                bytes.maketrans(b"+/", b"-_")
            )
    return found


FORMS = {f"{half}: {name}": form for half in HALVES for name, form in _forms(half).items()}


def _raw(told: bytes | str) -> bytes:
    return told if isinstance(told, bytes) else told.encode(errors="surrogatepass")


def leaks(told: bytes | str) -> list[str]:
    """The dresses in which the secret is in there."""
    raw = _raw(told)
    lower = raw.lower()
    return [
        name for name, form in FORMS.items() if form in raw or ("hex" in name and form in lower)
    ]


DRESSES = {
    "plain": lambda raw: raw,
    "base64": base64.b64encode,
    "base64, moved": lambda raw: base64.b64encode(b"a" + raw),
    "url-safe base64, moved": lambda raw: base64.urlsafe_b64encode(b"ab" + raw),
    "hex": lambda raw: raw.hex().upper().encode(),
    "utf-16": lambda raw: raw.decode().encode("utf-16"),
    "quoted": lambda raw: quote(raw.decode()).encode(),
    "JSON": lambda raw: json.dumps(raw.decode()).encode(),
    "bytes as Python shows them": lambda raw: repr(raw).encode(),
}


@pytest.mark.parametrize("dress", DRESSES)
def test_the_search_finds_it_in_every_dress(dress):
    for part in (SECRET, *HALVES):
        assert leaks(b"before " + DRESSES[dress](f"x{part}y".encode()) + b" behind"), part
    assert leaks(b"nothing of the kind") == []


# --- where it is looked for --------------------------------------------------------------------------


class _Lines(logging.Handler):
    """Every record of every logger, as a handler may show it."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.records: list[logging.LogRecord] = []
        self.shown: list[str] = []
        self.setFormatter(logging.Formatter("%(levelname)s %(name)s %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)
        self.shown += [self.format(record), repr(record.args), repr(record.exc_info)]


@pytest.fixture
def lines():
    """The root logger at DEBUG."""
    handler, root = _Lines(), logging.getLogger()
    before = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    yield handler
    root.setLevel(before)
    root.removeHandler(handler)


class Wire:
    """Sends what was collected by OTLP/HTTP, and keeps the bytes that came."""

    def __init__(self, receiver) -> None:
        self._receiver = receiver
        self._spans = OTLPSpanExporter(endpoint=f"{receiver.url}/v1/traces")
        self._metrics = OTLPMetricExporter(endpoint=f"{receiver.url}/v1/metrics")

    def sent(self, spans, metrics) -> tuple[bytes, ...]:
        """The bytes of spans, and those of metrics."""
        self._receiver.forget()
        assert self._spans.export(spans) is SpanExportResult.SUCCESS
        assert self._metrics.export(metrics) is MetricExportResult.SUCCESS
        bodies = self._receiver.bodies
        assert [path for path, _ in bodies] == ["/v1/traces", "/v1/metrics"]
        return tuple(body for _, body in bodies)

    def close(self) -> None:
        self._spans.shutdown()
        self._metrics.shutdown()


@pytest.fixture(scope="module")
def wire():
    """To a receiver on loopback."""
    with Receiver() as receiver:
        made = Wire(receiver)
        yield made
        made.close()


EMITTED = ("spans", "metrics", "traces over the wire", "metrics over the wire")


class Watcher:
    """All that is emitted while a test runs."""

    def __init__(self, wire, lines, store, capfd) -> None:
        self.lines, self.store = lines, store
        self._wire, self._capfd = wire, capfd
        self._memory, self._reader = InMemorySpanExporter(), InMemoryMetricReader()
        self.tracers = TracerProvider(shutdown_on_exit=False)
        self.tracers.add_span_processor(SimpleSpanProcessor(self._memory))
        self.meters = MeterProvider([self._reader], shutdown_on_exit=False)
        self.channels: list[str] = []  # while somebody waited

    def close(self) -> None:
        self.tracers.shutdown()
        self.meters.shutdown()

    @property
    def settings(self):
        """Of a guard that is watched."""
        return {"tracer_provider": self.tracers, "meter_provider": self.meters}

    @property
    def spans(self):
        """That ended so far."""
        return self._memory.get_finished_spans()

    @property
    def outcomes(self) -> list[str]:
        """That spans told so far."""
        ended = [span for span in self.spans if span.name == f"idemguard {TYPE}"]
        return [span.attributes["idemguard.outcome"] for span in ended]

    def ours(self) -> list[tuple[str, str]]:
        """Level and message of every line of our logger so far."""
        return [(r.levelname, r.getMessage()) for r in self.lines.records if r.name == "idemguard"]

    def everything(self) -> dict[str, list[bytes | str]]:
        """What went out, by its way."""
        metrics = self._reader.get_metrics_data()
        traces_sent, metrics_sent = self._wire.sent(self.spans, metrics)
        printed = self._capfd.readouterr()
        return {
            "spans": [text for span in self.spans for text in (span.to_json(), _all_of(span))],
            "metrics": [repr(metrics)],
            "traces over the wire": [traces_sent],
            "metrics over the wire": [metrics_sent],
            "log": self.lines.shown,
            "keys": [*_keys(self.store), *self.channels],
            "terminal": [printed.out, printed.err],
        }

    def found(self) -> dict[str, list[str]]:
        """The ways by which the secret went out, and the dresses."""
        everything = {way: b"\n".join(map(_raw, told)) for way, told in self.everything().items()}
        for way in EMITTED:
            assert TYPE.encode() in everything[way], f"{way}: nothing went out"
        return {way: names for way, told in everything.items() if (names := leaks(told))}

    def is_clean(self, *outcomes: str) -> None:
        """Spans told of these outcomes; much went out, and the secret by none of it."""
        assert self.outcomes == list(outcomes)
        assert self.found() == {}


def _all_of(span) -> str:
    """Everything that a processor could see, values as they are."""
    parts = [span.name, dict(span.attributes), span.instrumentation_scope, span.status.description]
    parts += [(event.name, dict(event.attributes)) for event in span.events]
    parts += [(link.context, dict(link.attributes)) for link in span.links]
    return repr(parts)


SEARCHED = {  # the columns of a file that something is found by
    "record": "namespace, fingerprint, scope, version, reused, kept_until, expires, first, last, due",
    "window": "namespace, start, span, task_type, agent",
    "namespace": "name",
}


def _keys(store) -> list[bytes | str]:
    """All that a store names what it holds by."""
    if isinstance(store, SqliteStore):
        if not store.path.exists():
            return []
        with closing(sqlite3.connect(store.path)) as file:
            there = dict(file.execute("SELECT name, sql FROM sqlite_master"))
            rows = [
                file.execute(f"SELECT {columns} FROM {table}").fetchall()
                for table, columns in SEARCHED.items()
                if table in there
            ]
        return [str(there), str(rows)]
    if not isinstance(store, RedisStore):
        return []
    with redis.Redis.from_url(store.test_url) as client:
        return [told for key in client.scan_iter("*") for told in (key, *_names(client, key))]


def _names(client, key: bytes) -> list[bytes]:
    """What is named inside of a key."""
    match client.type(key):
        case b"hash":
            return client.hkeys(key)
        case b"zset":
            return client.zrange(key, 0, -1)
        case b"set":
            return list(client.smembers(key))
    return []


@pytest.fixture
def watcher(wire, lines, store, capfd, request):
    """Sees all that goes out."""
    if isinstance(store, RedisStore):
        store.test_url = request.getfixturevalue("redis_url")
    made = Watcher(wire, lines, store, capfd)
    yield made
    made.close()


@pytest.fixture
def watched_guard(guard_of, watcher):
    """Makes guards that are watched."""
    return lambda **settings: guard_of(**watcher.settings | settings)


# --- secrets -----------------------------------------------------------------------------------------


class Client:
    """Nothing that has an identity, or can be stored; its repr tells all."""

    def __repr__(self) -> str:
        return f"<Client {SECRET}>"

    __str__ = __repr__


class Explosive:
    """Tells all when it is asked who it is."""

    def __idempotency_key__(self):
        raise RuntimeError(SECRET)


class BoomError(Exception):
    """What a body raises."""


def boom() -> BoomError:
    error = BoomError(SECRET, {SECRET: [SECRET]})
    error.add_note(SECRET)
    error.__cause__ = ValueError(SECRET)
    error.__context__ = KeyError(SECRET)
    error.detail = SECRET
    return error


class Mood(enum.Enum):
    """An enumeration that is talkative, one of its members an impostor."""

    GOOD = 1

    def __repr__(self) -> str:
        return SECRET


def impostor() -> Mood:
    made = object.__new__(Mood)
    made._name_, made._value_ = "BAD", SECRET
    return made


class Picky(pydantic.BaseModel):
    """A model that comes into being once, and tells all when it is restored."""

    text: str

    @pydantic.field_validator("text", mode="wrap")
    @classmethod
    def _checked(cls, text, _):
        if Picky.made:
            raise ValueError(f"I do not like {text}")
        Picky.made.append(text)
        return text


Picky.made = []


class Changing(pydantic.BaseModel):
    """A model that is another one when it is restored."""

    text: str

    @pydantic.field_validator("text")
    @classmethod
    def _longer(cls, text):
        return f"{text}{SECRET}"


def picky() -> Picky:
    Picky.made.clear()
    return Picky(text=SECRET)


def given() -> dict[str, Any]:
    """A call's arguments."""
    return {
        "doc": {"title": SECRET, f"of {SECRET}": [SECRET, {"deep": SECRET}]},
        "raw": SECRET.encode(),
        SECRET: 1,
    }


def result() -> dict[str, Any]:
    """What comes of it."""
    return {"answer": SECRET, SECRET: [SECRET.encode(), (SECRET,)]}


# --- shapes ------------------------------------------------------------------------------------------


class Shape:
    """Guards a plain function, in one of the ways that there are."""

    def __init__(self, name) -> None:
        self.name = name
        self.streams = name in ("stream", "astream")
        self.task = name in ("task", "atask")

    def guarded(self, guard, act, **options):
        """The function, guarded; not for tasks."""

        def plain(doc, **more):
            return act()

        async def coroutine(doc, **more):
            await asyncio.sleep(0)
            return act()

        def stream(doc, **more):
            yield SECRET
            yield act()
            return SECRET

        async def astream(doc, **more):
            yield SECRET
            await asyncio.sleep(0)
            yield act()

        made = {"plain": plain, "coroutine": coroutine, "stream": stream, "astream": astream}
        return guard.idempotent(made[self.name], **{"task_type": TYPE} | options)

    def call(self, guard, act, payload=None, **options):
        """One call of it, to its end."""
        payload = given() if payload is None else payload
        if self.task:
            return self._run_task(guard, act, payload, options)
        made = self.guarded(guard, act, **options)
        if self.name == "plain":
            return made(**payload)
        if self.name == "stream":
            return list(made(**payload))
        if self.name == "coroutine":
            return asyncio.run(made(**payload))
        return asyncio.run(_consumed(made, payload))

    def _run_task(self, guard, act, payload, options):
        if self.name == "task":
            return guard.run_task(TYPE, payload, lambda _: act(), **options).result

        async def body(_):
            await asyncio.sleep(0)
            return act()

        async def main():
            return (await guard.run_task(TYPE, payload, body, **options)).result

        return asyncio.run(main())

    def task_of(self, guard):
        """The task that a call is, with its results as they are stored."""
        if self.task:
            return Task.of(TYPE, given())
        return guard.task_of(self.guarded(guard, result), **given())

    def whole(self, value):
        """What a caller gets where the body gave this."""
        return [SECRET, value] if self.streams else value


async def _consumed(made, payload):
    return [chunk async for chunk in made(**payload)]


DECORATED = ("plain", "coroutine", "stream", "astream")
SHAPES = (*DECORATED, "task", "atask")


@pytest.fixture(params=SHAPES)
def shape(request):
    """Every shape."""
    return Shape(request.param)


@pytest.fixture
def decorated(request):
    """The shapes that a decorator makes."""
    return Shape(request.param)


of_decorated = pytest.mark.parametrize("decorated", DECORATED, indirect=True)
in_memory = pytest.mark.parametrize("store", ["memory"], indirect=True)  # another changes nothing


def briefly(test):
    """In memory, and in two shapes that have little in common."""
    return in_memory(pytest.mark.parametrize("shape", ["plain", "astream"], indirect=True)(test))


def raising(make):
    def act():
        raise make()

    return act


# --- what calls come to ------------------------------------------------------------------------------


def test_what_bodies_come_to(watcher, watched_guard, shape):
    guard = watched_guard(on_lost="raise")
    for _ in range(2):
        assert shape.call(guard, result) == shape.whole(result())
    with pytest.raises(BoomError, match=SECRET), scope("run/17"):
        shape.call(guard, raising(boom))
    for _ in range(2):
        with pytest.raises(UnknownOutcomeError):
            shape.call(guard, raising(lambda: UnknownOutcomeError(SECRET)), version="v2")
    with pytest.raises(OutOfScope):
        shape.call(guard, raising(lambda: OutOfScope(SECRET)), version="v3")
    handed_back = {"status": "out_of_scope", "why": SECRET}
    shape.call(guard, lambda: handed_back, version="v4")
    last = "executed" if shape.streams else "declined"
    watcher.is_clean("executed", "reused", "failed", "failed", "refused", "declined", last)


def test_left(watcher, watched_guard):
    guard = watched_guard()
    begun = Shape("stream").guarded(guard, result)(**given())
    assert next(begun) == SECRET
    begun.close()

    async def main():
        flow = Shape("astream").guarded(guard, result, version="a")(**given())
        assert await anext(flow) == SECRET
        await flow.aclose()

    asyncio.run(main())
    watcher.is_clean("failed", "failed")


NAMELESS = {
    "value": lambda: {"doc": Client()},
    "key": lambda: {"doc": {SECRET: {SECRET: Client()}}},
    "keyword": lambda: {"doc": 1, SECRET: Client()},
    "key of another type": lambda: {"doc": {(SECRET,): 1}},
    "two keys of one text": lambda: {"doc": {f"{SECRET}\u00e9": 1, f"{SECRET}e\u0301": 2}},
    "explosive": lambda: {"doc": [SECRET, Explosive()]},
}


@in_memory
def test_arguments_without_identity(watcher, watched_guard, shape):
    guard, observing = watched_guard(), watched_guard(mode="observe")
    for name, make in NAMELESS.items():
        with pytest.raises((FingerprintError, RuntimeError)):
            shape.call(guard, result, make())
        log.forget_warnings()
        watcher.lines.records.clear()
        assert shape.call(observing, result, make()) == shape.whole(result())
        ((level, said),) = watcher.ours()
        assert level == "WARNING"
        assert said.startswith(f"{TYPE}: this execution has no stable identity")
        assert ("RuntimeError" if name == "explosive" else "FingerprintError") in said
        assert "task_of" in said
    watcher.is_clean(*["refused", "unguarded"] * len(NAMELESS))


@in_memory
@of_decorated
def test_refused_for_a_key_function_that_fails(watcher, watched_guard, decorated):
    def key(bound):
        return bound[f"no {SECRET}"]

    with pytest.raises(KeyError):
        decorated.call(watched_guard(), result, key=key)
    decorated.call(watched_guard(mode="observe"), result, key=key)
    watcher.is_clean("refused", "unguarded")


@of_decorated
def test_an_explicit_key_and_its_conflict(watcher, watched_guard, decorated):
    guard, options = watched_guard(), {"key": lambda _: SECRET}
    decorated.call(guard, result, **options)
    with pytest.raises(KeyConflictError):
        decorated.call(guard, result, {"doc": f"another {SECRET}"}, **options)
    observing = watched_guard(mode="observe")
    decorated.call(observing, result, {"doc": f"a third {SECRET}"}, **options)
    assert any("idempotency key" in said for _, said in watcher.ours())
    watcher.is_clean("executed", "refused", "executed")


UNSTORABLE = {
    "object": (
        lambda: {SECRET: [Client()]},
        None,
        "Client is not named by the return annotation; return plain values",
    ),
    "long key": (lambda: {f"{SECRET}': {SECRET}: x {'y' * 60}": Client()}, None, "Client"),
    "identifier": (lambda: {HALVES[0]: {HALVES[1]: {1: {-2: Client()}}}}, None, "Client"),
    "deep keys": (lambda: _deep(30), None, "Client"),
    "numbers as keys": (lambda: _deep(30, key=1 << 1900), None, "result="),
    "error": (lambda: [ValueError(SECRET)], None, "ValueError"),
    "member": (lambda: [impostor()], list[Mood], "a value is no member of"),
    "refuses to be restored": (picky, Picky, "Picky cannot be restored"),
    "comes back changed": (
        lambda: Changing.model_construct(text=SECRET),
        Changing,
        "Changing comes back changed",
    ),
    "secret": (lambda: {SECRET: pydantic.SecretStr(SECRET)}, None, "SecretStr"),
    "too large": (lambda: SECRET * 1000, None, "max_result_bytes"),
    "too deep": (lambda: _deep(150, inner=SECRET), None, "nested deeper"),
}


def _deep(levels: int, inner=None, key=SECRET):
    value = Client() if inner is None else inner
    for _ in range(levels):
        value = {key: value}
    return value


def test_a_result_that_cannot_be_kept(watcher, watched_guard, shape):
    guard = watched_guard(max_result_bytes=20_000)
    for name, (make, annotation, words) in UNSTORABLE.items():
        options = {"version": name} | ({} if annotation is None else {"result": annotation})
        log.forget_warnings()
        watcher.lines.records.clear()
        shape.call(guard, make, **options)
        ((level, said),) = watcher.ours()
        assert level == "WARNING"
        assert words in said, name
        with pytest.raises(ResultUnavailableError):
            shape.call(guard, make, **options)
    watcher.is_clean(*["executed", "refused"] * len(UNSTORABLE))


@in_memory
def test_a_result_that_another_version_cannot_restore(watcher, watched_guard, shape):
    guard = watched_guard()
    shape.call(guard, lambda: {"text": SECRET})
    picky()  # from now on it refuses
    with pytest.raises(StoreError, match="cannot be read"):
        shape.call(guard, result, result=Picky)
    # a stream is restored as it is consumed
    watcher.is_clean("executed", "reused" if shape.streams else "refused")


# --- counting ----------------------------------------------------------------------------------------

GARBAGE = {
    "text": lambda: record_usage(SECRET),
    "number": lambda: record_usage(input_tokens=SECRET),
    "mapping": lambda: record_usage({"input_tokens": SECRET, SECRET: SECRET}),
    "field": lambda: record_usage(**{SECRET: 1}),
    "object": lambda: record_usage(Client()),
    "model": lambda: record_usage(input_tokens=1, model=[SECRET]),
    "aggregate": lambda: record_usage({"tokens": SECRET}, aggregate=True),
}


@in_memory
def test_usage_that_is_garbage(watcher, watched_guard, shape):
    guard = watched_guard(pricer=lambda _: None)
    for name, tell in GARBAGE.items():
        log.forget_warnings()
        watcher.lines.records.clear()
        shape.call(guard, lambda tell=tell: tell() or result(), version=name)
        ((_, said),) = watcher.ours()
        assert "usage could not be read (ValueError)" in said
    watcher.is_clean(*["executed"] * len(GARBAGE))


@in_memory
def test_usage_told_too_late(watcher, watched_guard):
    guard, told = watched_guard(), []
    Shape("plain").call(guard, lambda: told.append(current()) or result())
    told[0].record_usage({"tokens": SECRET})
    watcher.is_clean("executed")


@in_memory
def test_a_span_whose_usage_is_garbage(watcher, watched_guard, shape):
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(UsageSpanProcessor())

    def act():
        with provider.get_tracer("of an instrumentation").start_as_current_span("chat") as span:
            span.set_attribute("gen_ai.usage.input_tokens", SECRET)
            span.set_attribute("gen_ai.usage.output_tokens", 5)
            span.set_attribute("gen_ai.prompt", SECRET)
            span.set_attribute(SECRET, SECRET)
        return result()

    shape.call(watched_guard(), act)
    provider.shutdown()
    ((_, said),) = watcher.ours()
    assert "is no number of tokens" in said
    watcher.is_clean("executed")


@in_memory
def test_a_usage_function_that_fails(watcher, watched_guard, shape):
    def usage(value):
        raise KeyError(SECRET, value)

    shape.call(watched_guard(), result, usage=usage)
    tells = {"usage": lambda value: {"input_tokens": str(value)}, "version": "2"}
    shape.call(watched_guard(), result, **tells)
    assert "usage= failed on a result: KeyError" in watcher.ours()[0][1]
    watcher.is_clean("executed", "executed")


@in_memory
def test_a_pricer_that_fails(watcher, watched_guard, shape):
    def act():
        record_usage(input_tokens=5, output_tokens=5, model="m")
        return result()

    def pricer(usage):
        raise RuntimeError(SECRET)

    shape.call(watched_guard(pricer=pricer), act)
    ((_, said),) = watcher.ours()
    assert said == "pricer failed on model m: RuntimeError"
    watcher.is_clean("executed")


# --- beside others -----------------------------------------------------------------------------------


def test_waited_for_and_reused(watcher, watched_guard, shape, tapped, crew, until, standalone):
    guard = watched_guard(store=tapped)
    task = shape.task_of(guard)
    claim = guard.claim(task)
    waiter = crew.start(shape.call, guard, result)
    until(lambda: tapped.parked)
    if isinstance(tapped.store, RedisStore):
        with redis.Redis.from_url(standalone.url) as client:
            channels = until(lambda: [*client.pubsub_channels(), *client.pubsub_shardchannels()])
        assert any(task.fingerprint.encode() in channel for channel in channels)
        watcher.channels += channels
    assert claim.complete(shape.whole(result()))
    assert waiter.result(LONG) == shape.whole(result())
    assert "idemguard wait" in {span.name for span in watcher.spans}
    watcher.is_clean("reused")


def test_who_has_no_patience(watcher, watched_guard, shape):
    guard = watched_guard()
    claim = guard.claim(shape.task_of(guard))
    with pytest.raises(WaitTimeoutError):
        shape.call(guard, result, wait_timeout=0, on_timeout="raise")
    assert shape.call(guard, result, wait_timeout=0) == shape.whole(result())
    assert claim.complete(shape.whole(result())) is False
    watcher.is_clean("refused", "fallback")


def test_lost_and_taken_over(watcher, watched_guard, shape, clock):
    guard = watched_guard(lease=30)

    def overtaken():
        clock.advance(31)
        assert guard.claim(shape.task_of(guard)).complete(shape.whole(result()))
        return result()

    shape.call(guard, overtaken)
    clock.advance(1000)
    assert guard.claim(shape.task_of(guard)) is not None
    clock.advance(31)
    with pytest.raises(UnknownOutcomeError):
        shape.call(guard, result, on_lost="raise")
    shape.call(guard, result)
    assert any(event.name == "idemguard.lost" for event in watcher.spans[0].events)
    watcher.is_clean("executed", "refused", "executed")


@in_memory
def test_bypassed_observed_and_nested(watcher, watched_guard, shape):
    inner, modes = Shape("task"), ("enforce", "observe")
    for mode in modes:
        guard = watched_guard(mode=mode)

        def outer(guard=guard):
            return inner.call(guard, result, {"doc": f"inner {SECRET}"})

        act = result if shape.name in ("coroutine", "astream", "atask") else outer
        with bypass():
            shape.call(guard, act, version=mode)
    assert set(watcher.outcomes) == {"executed"}
    watcher.is_clean(*watcher.outcomes)


# --- a store that fails ------------------------------------------------------------------------------

FAILURES = {
    "away": lambda: StoreUnavailableError("connection refused"),
    "foreign": lambda: RuntimeError(f"INSERT INTO t VALUES ({SECRET})"),
    "lookup": lambda: KeyError(SECRET),
}


def test_no_store_before(watcher, watched_guard, shape, tapped):
    for name, failure in FAILURES.items():
        tapped.fails = failure()
        with pytest.raises(StoreError):
            shape.call(watched_guard(store=tapped), result, version=name)
        shape.call(watched_guard(store=tapped, mode="observe"), result, version=name)
    tapped.up()
    watcher.is_clean(*["refused", "unguarded"] * len(FAILURES))


@in_memory
def test_the_password_of_a_store_that_is_not_there(watcher, watched_guard):
    where = f"redis://somebody:{quote(SECRET)}@{HOST}:{free_port()}/0"
    with pytest.raises(StoreUnavailableError):
        Shape("plain").call(watched_guard(store=where), result)
    running = watched_guard(store=where, on_store_error="run")
    Shape("coroutine").call(running, result)
    running.engine.backlog._owed.clear()
    told = [said for _, said in watcher.ours() if "secretive" in said]  # not of an earlier store
    assert [f"{HOST}:" in said for said in told] == [True, True]
    watcher.is_clean("refused", "unguarded")


@pytest.mark.parametrize("name", FAILURES)
@in_memory
def test_no_store_at_the_end(watcher, watched_guard, shape, tapped, name):
    def fails(command):
        return FAILURES[name]() if isinstance(command, (Complete, Release)) else None

    def act(error=None):
        tapped.fails = fails
        if error is not None:
            raise error
        return result()

    guard = watched_guard(store=tapped)
    assert shape.call(guard, act) == shape.whole(result())
    tapped.up()
    with pytest.raises(BoomError):
        shape.call(guard, lambda: act(boom()), version="2")
    for _ in range(PATIENT):
        guard.engine.backlog.settle()
    tapped.up()
    told = [said for _, said in watcher.ours()]
    assert any("told to the store later" in said for said in told)
    assert any("does not take a step" in said for said in told) is (name != "away")
    watcher.is_clean("executed", "failed")


@in_memory
def test_a_step_beside_the_calls_that_fails(watcher, watched_guard, until):
    guard = watched_guard()
    Shape("plain").call(guard, result)

    def step():
        raise RuntimeError(SECRET)

    heart_of(guard.engine.store).after(0, step)
    (said,) = until(lambda: [line for line in watcher.ours() if line[0] == "ERROR"])
    assert "RuntimeError" in said[1]
    assert __file__ in said[1]
    watcher.is_clean("executed")


@pytest.mark.parametrize("store", ["sqlite"], indirect=True)
def test_a_call_that_is_cancelled_while_its_store_fails(watcher, watched_guard, tapped, lines):
    asked, go_on = threading.Event(), threading.Event()

    def fails(command):
        asked.set()
        assert go_on.wait(LONG)
        return RuntimeError(SECRET)

    async def main():
        made = Shape("coroutine").guarded(watched_guard(store=tapped), result)
        tapped.fails = fails
        call = asyncio.ensure_future(made(**given()))
        assert await asyncio.to_thread(asked.wait, LONG)
        call.cancel()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await call

    asyncio.run(main())
    tapped.up()
    gc.collect()
    assert not any("never retrieved" in shown for shown in lines.shown)
    watcher.is_clean("failed")


# --- by hand -----------------------------------------------------------------------------------------


class Hand:
    """A guard whose claims are held by hand, plainly or awaited."""

    def __init__(self, guard, *, is_async) -> None:
        self._guard, self._is_async = guard, is_async
        self._whom = guard.aio if is_async else guard

    def __getattr__(self, name):
        def call(*args, **kwargs):
            return self._done(getattr(self._whom, name)(*args, **kwargs))

        return call

    def claim(self, *args, **kwargs):
        found = self._done(self._whom.claim(*args, **kwargs))
        if found is None:
            return None
        hand = Hand(self._guard, is_async=self._is_async)
        hand._whom = found
        return hand

    def _done(self, found):
        async def main():
            return await found

        return asyncio.run(main()) if self._is_async else found


@pytest.mark.parametrize("is_async", [False, True], ids=["plain", "awaited"])
def test_claims_that_are_held_by_hand(watcher, watched_guard, clock, is_async):
    guard = watched_guard(lease=30, on_lost="raise")
    hand = Hand(guard, is_async=is_async)
    first, second, third, fourth = (
        Task.of(TYPE, {"n": n, SECRET: [SECRET]}, version="v") for n in range(4)
    )
    with guard.engine.telemetry.tracer.start_as_current_span("around"):
        claim = hand.claim(first, "w-1")
    claim.renew()
    with pytest.raises(ValueError, match=SECRET):
        claim.complete(result(), usage={"input_tokens": SECRET})
    assert claim.complete(result(), usage={"input_tokens": 5})
    assert hand.claim(first) is None
    assert hand.peek(first).result == hand.wait_result(first, 1).result == result()
    assert hand.claim(second).complete({SECRET: Client()})
    with pytest.raises(ResultUnavailableError):
        hand.peek(second)
    lost = hand.claim(third)
    clock.advance(31)
    with pytest.raises(UnknownOutcomeError):
        hand.claim(third)
    with pytest.raises(Exception, match="Client"):
        hand.resolve(third, {SECRET: Client()})
    hand.resolve(third, result())
    hand.forget(third)
    with pytest.raises(LeaseLostError):
        lost.renew()
    hand.claim(fourth).release()
    assert any("cannot be kept" in said for _, said in watcher.ours())
    Shape("plain").call(guard, result)  # a span, since claims have none
    watcher.is_clean("executed")
    for shown in (first, claim._whom, guard, hand._whom, guard.engine.store):
        assert leaks(repr(shown)) == []


# --- where it is asked for ---------------------------------------------------------------------------


@in_memory
def test_exceptions_are_on_spans_where_that_is_asked_for_and_only_there(
    watcher, watched_guard, shape
):
    guard = watched_guard(record_exceptions=True)
    with pytest.raises(BoomError):
        shape.call(guard, raising(boom))
    with pytest.raises(FingerprintError):
        shape.call(guard, result, {"doc": {SECRET: Client()}})
    assert watcher.outcomes == ["failed", "refused"]
    for span in watcher.spans:
        assert [event.name for event in span.events] == ["exception"]
        assert leaks(span.events[0].attributes["exception.message"])
        assert leaks(span.name) == leaks(repr(dict(span.attributes))) == []
        assert span.status.description is None
    assert watcher.found().keys() == {"spans", "traces over the wire"}


# --- what the log says -------------------------------------------------------------------------------


def name_of(calls) -> str:
    return f"{TYPE} [{calls[-1].fingerprint[:16]}]"


@briefly
def test_nothing_is_said_of_what_is_no_event(watcher, watched_guard, shape):
    guard = watched_guard()
    for _ in range(2):
        shape.call(guard, result)
    with pytest.raises(BoomError):
        shape.call(guard, raising(boom), version="2")
    assert watcher.ours() == []


@briefly
def test_a_fallback_is_said(watcher, watched_guard, shape):
    guard = watched_guard()
    assert guard.claim(shape.task_of(guard)) is not None
    with capture() as calls:
        shape.call(guard, result, wait_timeout=0)
    ((level, said),) = watcher.ours()
    assert level == "INFO"
    assert said.startswith(f"{name_of(calls)}: fallback")
    assert "wait_timeout" in said


@briefly
def test_a_task_that_is_handed_back_is_said(watcher, watched_guard, shape):
    with capture() as calls, pytest.raises(OutOfScope):
        shape.call(watched_guard(), raising(OutOfScope))
    ((level, said),) = watcher.ours()
    assert level == "INFO"
    assert said.startswith(f"{name_of(calls)}: declined")


@briefly
def test_a_loss_and_who_takes_over_are_said(watcher, watched_guard, shape, clock, crew):
    guard, taking_over = watched_guard(lease=30), []

    def overtaken():
        clock.advance(31)
        # in another thread, where nothing of this execution is current
        body = shape.whole(result()) if shape.streams else result()
        taking_over.append(crew.start(guard.run_task, TYPE, given(), lambda _: body).result(LONG))
        return result()

    for level in ("WARNING", "INFO"):  # within a minute it is no warning, but a line all the same
        watcher.lines.records.clear()
        shape.call(guard, overtaken)
        name = name_of(taking_over)
        taken, lost = watcher.ours()
        assert taken == ("INFO", f"{name}: taken over from an execution that was lost")
        assert lost[0] == level
        assert lost[1].startswith(f"{name}: its lease ran out")
        guard.forget(shape.task_of(guard))


@briefly
def test_a_refusal_is_said(watcher, watched_guard, shape):
    guard = watched_guard()
    assert guard.claim(shape.task_of(guard)) is not None
    with capture() as calls, pytest.raises(WaitTimeoutError):
        shape.call(guard, result, wait_timeout=0, on_timeout="raise")
    with pytest.raises(FingerprintError):
        shape.call(guard, result, {"doc": Client()})
    assert watcher.ours() == [
        ("INFO", f"{name_of(calls)}: refused: WaitTimeoutError"),
        ("INFO", f"{TYPE}: refused: FingerprintError"),
    ]


@briefly
def test_a_store_that_fails_before_is_said(watcher, watched_guard, shape, tapped):
    tapped.down("connection refused by 10.0.0.1")
    with capture() as calls, pytest.raises(StoreUnavailableError):
        shape.call(watched_guard(store=tapped), result)
    running = watched_guard(store=tapped, on_store_error="run")
    for _ in range(2):
        shape.call(running, result)
    tapped.up()
    refused, *unguarded = watcher.ours()
    assert refused[0] == "INFO"
    assert refused[1].startswith(f"{name_of(calls)}: refused: ")
    assert [level for level, _ in unguarded] == ["WARNING", "INFO"]
    assert {said for _, said in unguarded} == {
        f"{name_of(calls)}: executed without a claim: connection refused by 10.0.0.1"
    }
    assert "connection refused by 10.0.0.1" in refused[1]


@briefly
def test_a_store_that_fails_at_the_end_is_said(watcher, watched_guard, shape, tapped):
    def act():
        tapped.down("connection refused by 10.0.0.1")
        return result()

    guard = watched_guard(store=tapped)
    for number in range(2):
        tapped.up()
        watcher.lines.records.clear()
        with capture() as calls:
            shape.call(guard, act, version=str(number))
        words = "its end is told to the store later: connection refused by 10.0.0.1"
        assert watcher.ours() == [(("WARNING", "INFO")[number], f"{name_of(calls)}: {words}")]
    tapped.up()


def test_a_note_is_an_info_of_our_logger(lines):
    log.note("%s happened to %s", "it", TYPE)
    (record,) = (record for record in lines.records if record.name == "idemguard")
    assert (record.levelname, record.getMessage()) == ("INFO", f"it happened to {TYPE}")


# --- the words of errors -----------------------------------------------------------------------------


def _caused(error, cause):
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError(SECRET), "ValueError"),
        (BoomError(SECRET), "BoomError"),
        (StoreError("wrong password"), "wrong password"),
        (_caused(StoreError("down"), OSError("down")), "down"),
        (_caused(StoreUnavailableError("down"), redis.ConnectionError("down")), "down"),
        (_caused(StoreError(f"failed: {SECRET}"), ValueError(SECRET)), "StoreError (ValueError)"),
        (
            StoreError(f"unknown command 'X', with args beginning with: '{SECRET}' \n'{SECRET}'"),
            "unknown command 'X'",
        ),
        (
            _caused(
                StoreError(f"the row is damaged ({SECRET}\n(x)); forget() the task to drop it"),
                FingerprintError(SECRET),
            ),
            "the row is damaged; forget() the task to drop it",
        ),
    ],
)
def test_of_an_error_only_a_stores_own_words_are_said(error, said):
    assert log.words(error) == said


@pytest.mark.parametrize(
    "reason",
    [
        "",
        SECRET,
        f"result.{SECRET}",
        f"result['{SECRET}",
        f"result['a']: {SECRET}",
        f"result['a']: {SECRET} is odd",
        f"result[{SECRET}]: Client has no stored form; x",
        f"result: larger than the 5 bytes of max_result_bytes; {SECRET}",
    ],
)
def test_of_a_reason_that_nobody_knows_nothing_is_said(reason):
    assert leaks(log.unstorable(f"{TYPE}: {reason}", TYPE)) == []
    assert "result=" in log.unstorable(reason, TYPE)
