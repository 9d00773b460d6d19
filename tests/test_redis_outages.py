"""Whatever a server does or refuses, a paid result reaches its caller, and the ledger is true afterwards."""

from __future__ import annotations

import pickle
import re
import socket
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from servers.server import HOST, Server, free_port, until
from test_redis_faults import KINDS, LONG, Lab

from idemguard import errors
from idemguard.stores import wire

SECRET = "s3cret/pw"
SOON = 20.0  # seconds within which what needs no lease to end has happened


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def lab_of(kind):
    """Makes labs, closed with the test."""
    made = []

    def make(where, **settings):
        made.append(Lab(where, kind, **settings))
        return made[-1]

    yield make
    for lab in made:
        lab.close()


@pytest.fixture
def lab(lab_of, own_server):
    """A lab on a server of its own."""
    return lab_of(own_server.url)


def listeners(server, lab) -> int:
    """How many connections listen for hints of the lab's task."""
    channel = wire.keys(lab.address())[0]
    return dict(server.own.pubsub_numsub(channel))[channel.encode()]


def heard(server, lab) -> None:
    until(lambda: listeners(server, lab) >= 1, LONG, "the waiter listens")


# --- killed and restarted -------------------------------------------------------------------------------

EMPTY = pytest.mark.parametrize("empty", [False, True], ids=["with its data", "without"])


@EMPTY
def test_a_server_restarts_between_calls(lab, own_server, empty):
    assert lab.call().source == "executed"
    own_server.kill()
    own_server.start(empty=empty)
    again = lab.call()
    assert again.source == ("executed" if empty else "reused")
    assert lab.call(2).source == "executed"
    assert (again.cause, again.runs) == (("first", 1) if empty else (None, 1)) or not empty
    assert lab.account(unbooked=1 if empty else 0)["duplicates"] == 0


@EMPTY
def test_a_server_restarts_while_a_body_runs(lab, own_server, empty):
    leader = lab.lead()
    own_server.kill()
    own_server.start(empty=empty)
    lab.gate.set()
    outcome = leader.result(LONG)
    assert (outcome.source, outcome.result, outcome.lost) == ("executed", "value of 1", False)
    assert lab.call().source == "reused"
    assert lab.account()["executed"] == 1


@EMPTY
def test_a_server_is_away_when_a_body_ends(lab, own_server, warned, empty):
    leader = lab.lead()
    own_server.kill()
    lab.gate.set()
    outcome = leader.result(SOON)
    assert (outcome.source, outcome.result) == ("executed", "value of 1")
    assert len(warned()) == 1
    own_server.start(empty=empty)
    lab.told()
    assert lab.call().source == "reused"
    totals = lab.account()
    assert (totals["executed"], totals["duplicates"], totals["lost"]) == (1, 0, 0)


@EMPTY
def test_a_server_restarts_while_one_waits(lab_of, own_server, empty):
    leading, waiting = (lab_of(own_server.url, lease=LONG) for _ in range(2))
    leader = leading.lead()
    waiter = waiting.start()
    heard(own_server, waiting)
    own_server.kill()
    own_server.start(empty=empty)
    heard(own_server, waiting)
    leading.gate.set()
    assert leader.result(LONG).source == "executed"
    assert waiter.result(LONG).result == "value of 1"
    if not empty:
        assert waiting.bodies == []
        assert waiter.result().source == "reused"
    leading.told()
    leading.bodies += waiting.bodies
    leading.account()


@pytest.mark.parametrize("on_store_error", ["raise", "run"])
def test_a_server_is_away_for_a_whole_lease_while_one_waits(lab_of, own_server, on_store_error):
    leading = lab_of(own_server.url, lease=1.8)
    waiting = lab_of(own_server.url, lease=0.4, on_store_error=on_store_error)
    leader = leading.lead()
    waiter = waiting.start()
    heard(own_server, waiting)
    own_server.kill()
    if on_store_error == "raise":
        with pytest.raises(errors.StoreUnavailableError) as caught:
            waiter.result(LONG)
        tells(caught.value, own_server, waiting)
        assert waiting.bodies == []
    else:
        assert waiter.result(LONG).source == "unguarded"
    leading.gate.set()
    assert leader.result(LONG).result == "value of 1"
    own_server.start()
    waiting.told()
    leading.bodies += waiting.bodies
    assert leading.account()["executed"] == 1


# --- emptied ---------------------------------------------------------------------------------------------


def test_a_server_is_emptied_while_a_body_runs(lab, own_server):
    leader = lab.lead()
    own_server.tell("FLUSHALL")
    lab.gate.set()
    assert leader.result(LONG).source == "executed"
    assert lab.call().source == "reused"
    assert lab.account()["executed"] == 1


def test_a_server_is_emptied_while_a_leader_renews_and_another_waits(lab_of, own_server):
    # the one that waits asks after a third of its own lease, long after the next renewal
    leading, waiting = (lab_of(own_server.url, lease=lease) for lease in (1.8, LONG))
    leader = leading.lead()
    waiter = waiting.start()
    heard(own_server, waiting)
    beats = own_server.own.pubsub(ignore_subscribe_messages=True)
    beats.subscribe(wire.keys(leading.address())[0])
    until(lambda: beats.get_message(timeout=0.1), LONG, "it renews, and the waiter has heard it")
    beats.close()
    own_server.tell("FLUSHALL")
    until(lambda: own_server.tell("EXISTS", wire.keys(leading.address())[0]), LONG, "it renews")
    leading.gate.set()
    assert leader.result(LONG).source == "executed"
    assert waiter.result(LONG).source == "reused"
    assert waiting.bodies == []
    assert leading.account()["duplicates"] == 0


def test_the_scripts_are_flushed_between_calls_and_while_a_body_runs(lab, own_server):
    lab.call(0)
    own_server.tell("SCRIPT", "FLUSH")
    leader = lab.lead()
    own_server.tell("SCRIPT", "FLUSH")
    lab.gate.set()
    assert leader.result(LONG).source == "executed"
    own_server.tell("SCRIPT", "FLUSH")
    assert lab.call().source == "reused"
    assert lab.account()["executions"] == 2


# --- connections killed, commands held back -----------------------------------------------------------------


@pytest.mark.parametrize("which", ["normal", "pubsub"])
def test_connections_are_killed_while_one_executes_and_another_waits(lab_of, own_server, which):
    leading, waiting = (lab_of(own_server.url) for _ in range(2))
    leader = leading.lead()
    waiter = waiting.start()
    heard(own_server, waiting)
    for _ in range(3):
        own_server.tell("CLIENT", "KILL", "TYPE", which, "SKIPME", "yes")
    heard(own_server, waiting)
    leading.gate.set()
    assert leader.result(LONG).source == "executed"
    assert waiter.result(SOON).source == "reused"
    assert waiting.bodies == []
    assert leading.account()["executions"] == 1


@pytest.mark.parametrize("which", ["WRITE", "ALL"])
def test_commands_are_held_back_for_a_while(lab, own_server, which):
    leader = lab.lead()
    own_server.tell("CLIENT", "PAUSE", 600, which)
    started = time.monotonic()
    lab.gate.set()
    assert leader.result(LONG).source == "executed"
    assert time.monotonic() - started > 0.3
    own_server.tell("CLIENT", "PAUSE", 600, which)
    assert lab.call(2).source == "executed"
    assert lab.call().source == "reused"
    assert lab.account()["executions"] == 2


# --- refusals ------------------------------------------------------------------------------------------------


@contextmanager
def read_only(server, lab):
    server.tell("REPLICAOF", HOST, free_port())
    yield
    server.tell("REPLICAOF", "NO", "ONE")


@contextmanager
def out_of_memory(server, lab):
    server.tell("CONFIG", "SET", "maxmemory-policy", "noeviction")
    server.tell("CONFIG", "SET", "maxmemory", 1)
    yield
    server.tell("CONFIG", "SET", "maxmemory", 0)


@contextmanager
def password_asked(server, lab):
    server.tell("CONFIG", "SET", "requirepass", SECRET)
    server.tell("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    yield
    server.tell("CONFIG", "SET", "requirepass", "")


@contextmanager
def wrong_type(server, lab):
    key = wire.keys(lab.address())[0]
    kept = server.tell("DUMP", key)
    server.tell("DEL", key)
    server.tell("RPUSH", key, "of another program")
    yield
    server.tell("DEL", key)
    if kept is not None:
        server.tell("RESTORE", key, 60_000, kept)


REFUSALS = pytest.mark.parametrize(
    ("refusal", "words"),
    [
        (read_only, r"READONLY .*primary"),
        (out_of_memory, r"OOM .*maxmemory"),
        (password_asked, r"Authentication required.*URL|NOAUTH.*URL"),
        (wrong_type, r"WRONGTYPE .*another program"),
    ],
    ids=["replica", "memory", "password", "type"],
)


@REFUSALS
@pytest.mark.parametrize("on_store_error", ["raise", "run"])
def test_a_refusal_before_the_body_is_an_error_in_words(
    lab, own_server, refusal, words, on_store_error
):
    lab.call(0)
    with refusal(own_server, lab):
        with pytest.raises(errors.StoreError) as caught:
            lab.call(on_store_error=on_store_error)
        assert not isinstance(caught.value, errors.StoreUnavailableError)
        tells(caught.value, own_server, lab)
        assert re.search(words, str(caught.value))
        assert lab.bodies == [0]
    lab.told()
    assert lab.call().source == "executed"
    assert lab.account()["executions"] == 2


@REFUSALS
def test_a_refusal_after_the_body_keeps_no_value_from_its_caller(
    lab, own_server, warned, refusal, words
):
    leader = lab.lead()
    with refusal(own_server, lab):
        lab.gate.set()
        outcome = leader.result(LONG)
        assert (outcome.source, outcome.result) == ("executed", "value of 1")
        assert len(warned()) == 1
        assert re.search(words, warned()[0])
        tells(warned()[0], own_server, lab)
    lab.told()
    assert lab.call().source == "reused"
    totals = lab.account()
    assert (totals["executed"], totals["lost"], totals["duplicates"]) == (1, 0, 0)


def tells(error, server, lab) -> None:
    """A message names the task and the server, and tells no secret."""
    text = str(error)
    assert lab.address().fingerprint[:16] in text
    assert f"{HOST}:{server.port}" in text
    assert SECRET not in text


# --- loading ---------------------------------------------------------------------------------------------------


def test_a_server_that_loads_its_data_is_waited_for(lab_of):
    with Server("--appendonly", "yes", "--key-load-delay", "80") as server:
        lab = lab_of(server.url)
        assert lab.call().source == "executed"
        leader = lab.lead(2)
        server.tell("EVAL", "for n = 1, 8000 do redis.call('SET', 'k' .. n, n) end", 0)
        server.kill()
        server.launch()
        until(lambda: _says_loading(server), LONG, "it loads")
        assert lab.start().result(LONG).source == "reused"
        server.kill()
        server.launch()
        until(lambda: _says_loading(server), LONG, "it loads")
        lab.gate.set()
        assert leader.result(LONG).source == "executed"
        assert lab.call(2).source == "reused"
        assert lab.account()["executions"] == 2


def _says_loading(server) -> bool:
    with socket.create_connection((HOST, server.port), timeout=2) as wire_:
        wire_.sendall(b"GET k\r\n")
        told = wire_.recv(64)
        assert not told.startswith(b"$"), "it has loaded already"
        return told.startswith(b"-LOADING")


# --- unreachable from the start ------------------------------------------------------------------------------------


@contextmanager
def refusing():
    """A port that nobody listens on."""
    yield free_port()


@contextmanager
def silent():
    """A port at which no connection comes about."""
    with socket.socket() as deaf:
        deaf.bind((HOST, 0))
        deaf.listen(0)
        crowd = []
        for _ in range(4):  # its backlog is full then
            one = socket.socket()
            one.setblocking(False)
            one.connect_ex(deaf.getsockname())
            crowd.append(one)
        yield deaf.getsockname()[1]
        for one in crowd:
            one.close()


PLACES = pytest.mark.parametrize("place", [refusing, silent])


def url_at(port) -> str:
    return f"redis://user:{SECRET.replace('/', '%2F')}@{HOST}:{port}/0?socket_connect_timeout=0.5"


@PLACES
def test_nobody_answers_from_the_start_and_the_call_fails_soon(lab_of, place, warned):
    with place() as port:
        lab = lab_of(url_at(port))
        started = time.monotonic()
        with pytest.raises(errors.StoreUnavailableError) as caught:
            lab.call()
        assert time.monotonic() - started < 4.5  # as one that says "soon" is waited for
        said = (
            f"{caught.value} {caught.value!r} {caught.value.__cause__!r} {lab.store!r} {warned()}"
        )
        assert f"{HOST}:{port}" in str(caught.value)
        assert lab.address().fingerprint[:16] in str(caught.value)
        assert SECRET not in said
        assert "s3cret" not in said
        assert lab.bodies == []


@PLACES
def test_nobody_answers_from_the_start_and_calls_run_unguarded(lab_of, place, warned):
    with place() as port:
        lab = lab_of(url_at(port), on_store_error="run")
        started = time.monotonic()
        outcomes = [lab.call() for _ in range(2)]
        assert time.monotonic() - started < 9.0
        assert [o.source for o in outcomes] == ["unguarded"] * 2
        assert [o.result for o in outcomes] == ["value of 1"] * 2
        assert len(warned()) == 1
        assert f"{HOST}:{port}" in warned()[0]
        assert "s3cret" not in warned()[0]
        assert len(lab.bodies) == 2


def test_unguarded_executions_reach_the_ledger_when_the_server_is_there(lab_of, own_server):
    own_server.kill()
    lab = lab_of(own_server.url, on_store_error="run")
    assert [lab.call(n).source for n in (1, 1)] == ["unguarded"] * 2
    own_server.start()
    totals = lab.account()
    assert (totals["unguarded"], totals["calls"], totals["duplicates"]) == (2, 2, 2)
    assert {line.cause for line in lab.ledger.lines()} == {"unguarded"}
    assert lab.call().source == "executed"
    lab.account()


@PLACES
def test_observing_is_neither_refused_nor_held_up_where_nobody_answers(lab_of, place, warned):
    with place() as port:
        lab = lab_of(url_at(port), mode="observe")
        started = time.monotonic()
        outcomes = [lab.call() for _ in range(30)]
        assert time.monotonic() - started < 8  # and not 30 times the time to connect
        assert [o.result for o in outcomes] == ["value of 1"] * 30
        assert len(warned()) == 1


@REFUSALS
def test_observing_never_raises(lab, own_server, warned, refusal, words):
    with refusal(own_server, lab):
        assert lab.call(mode="observe").result == "value of 1"
        assert len(warned()) == 1
        assert re.search(words, warned()[0])
    assert lab.bodies == [1]


# --- what somebody else put under our keys ------------------------------------------------------------------------


class Canary:
    """Leaves a file when it is unpickled."""

    def __init__(self, path) -> None:
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def foreign(canary) -> dict[str, bytes]:
    """What must not be taken for ours."""
    return {
        "pickle": pickle.dumps(Canary(canary)),
        "bytes": bytes(range(256)),
        "json": b'{"status": "done", "result": 42}',
        "number": b"17",
        "nothing": b"",
        "half": b"idemguard1:",
        "mark and pickle": b"idemguard1:" + pickle.dumps(Canary(canary)),
        "mark and bytes": b"idemguard1:" + bytes(range(255, 0, -1)),
    }


def test_a_foreign_record_is_an_error_and_executes_nothing(lab, own_server, tmp_path):
    canary = tmp_path / "sung"
    key = wire.keys(lab.address())[0]
    lab.call()
    for content in foreign(canary).values():
        own_server.tell("SET", key, content)
        before = len(lab.bodies)
        with pytest.raises(errors.StoreError) as caught:
            lab.call()
        assert not isinstance(caught.value, errors.StoreUnavailableError)
        tells(caught.value, own_server, lab)
        assert "forget" in str(caught.value)
        with pytest.raises(errors.StoreError):
            lab.hand("peek", lab.task())
        with pytest.raises(errors.StoreError):
            lab.ledger.runs(lab.task().fingerprint)
        assert len(lab.bodies) == before
        lab.hand("forget", lab.task())
        assert lab.call().source == "executed"
        assert lab.call().source == "reused"
    assert not canary.exists()


@pytest.mark.parametrize("field", ["source", "spent", "codec", "data"])
def test_a_foreign_result_is_an_error_and_executes_nothing(lab, own_server, tmp_path, field):
    canary = tmp_path / "sung"
    lab.call()
    key = wire.keys(lab.address())[1]
    assert set(own_server.own.hkeys(key)) == {b"source", b"spent", b"codec", b"data"}
    kept = own_server.own.hget(key, field)
    for name, content in foreign(canary).items():
        if (field, name) == ("spent", "nothing") or (
            field == "data" and name in ("json", "number")
        ):
            continue  # these are well-formed
        own_server.own.hset(key, field, content)
        with pytest.raises(errors.StoreError) as caught:
            lab.call()
        assert lab.address().fingerprint[:16] in str(caught.value), name
        assert "forget" in str(caught.value), name
        assert len(lab.bodies) == 1
    own_server.own.hset(key, field, kept)
    assert lab.call().source == "reused"
    own_server.own.hset(key, field, b"\xff\x00")
    lab.hand("forget", lab.task())
    assert lab.call().cause == "forced"
    assert lab.call().source == "reused"
    assert not canary.exists()


CHANGE = """
local head = 'idemguard1:'
local sum = 8
local f = cmsgpack.unpack(string.sub(redis.call('GET', KEYS[1]), #head + sum + 1))
local junk = ({text = 'junk', list = {1, {2}}, no = false, float = 1.5})[ARGV[2]]
if ARGV[1] == '' then f[tonumber(ARGV[3])] = junk else f[21][1][tonumber(ARGV[3])] = junk end
local body = cmsgpack.pack(f)
local right = string.sub(redis.sha1hex(body), 1, sum)
redis.call('SET', KEYS[1], head .. right .. body, 'KEEPTTL')
"""


@pytest.mark.parametrize("part", ["", "line"])
@pytest.mark.parametrize("kind", ["plain"], indirect=True)
def test_a_record_with_a_field_of_another_kind_is_an_error_or_goes_on(lab, own_server, part):
    """Never anything but a `StoreError`; a field that nobody looks at may do no harm."""
    key = wire.keys(lab.address())[0]
    wrong = []
    for field in range(1, 22 if not part else 15):
        for junk in ("text", "list", "no", "float"):
            lab.hand("forget", lab.task())
            lab.call()
            own_server.tell("EVAL", CHANGE, 1, key, part, junk, field)
            for name, act in {
                "call": lab.call,
                "peek": lambda: lab.hand("peek", lab.task()),
                "runs": lambda: lab.ledger.runs(lab.task().fingerprint),
                "lines": lambda: list(lab.ledger.lines()),
                "forget": lambda: lab.hand("forget", lab.task()),
            }.items():
                try:
                    act()
                except errors.KeyConflictError:
                    assert (part, field) == ("", 7)  # the digest of the payload: another one
                except errors.StoreError as error:
                    if name == "forget":
                        wrong.append((field, junk, name, str(error)[:300]))
                except Exception as error:  # noqa: BLE001 - it is what must not come
                    wrong.append((field, junk, name, repr(error)[:300]))
            own_server.tell("DEL", key)
    assert wrong == [], "\n".join(map(str, wrong))


# --- secrets ---------------------------------------------------------------------------------------------------------


def test_no_message_tells_the_password(kind, warned):
    said = []
    with Server("--appendonly", "yes", password=SECRET) as server:
        url = f"redis://:{SECRET.replace('/', '%2F')}@{HOST}:{server.port}/0?socket_connect_timeout=0.5"
        lab = Lab(url, kind)
        try:
            leader = lab.lead()
            said += [repr(lab.store), repr(lab.guard), str(lab.guard.engine)]
            server.tell("CONFIG", "SET", "requirepass", SECRET + "-new")
            server.tell("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            for act in (lambda: lab.call(2), lambda: lab.hand("peek", lab.task())):
                with pytest.raises(errors.StoreError, match="check user and password") as caught:
                    act()
                said += _all_words(caught.value)
            lab.gate.set()
            assert leader.result(LONG).result == "value of 1"
            server.tell("CONFIG", "SET", "requirepass", SECRET)
            lab.told()
            server.kill()
            with pytest.raises(errors.StoreUnavailableError) as caught:
                lab.call(3)
            said += _all_words(caught.value)
        finally:
            lab.close()
    assert len(warned()) == 1
    said += warned()
    assert [text for text in said if "s3cret" in text or "%2F" in text] == []


def _all_words(error):
    while error is not None:
        yield from (str(error), repr(error), repr(vars(error)))
        error = error.__cause__ or error.__context__
