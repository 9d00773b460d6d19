"""All lines of a namespace are read while others write: between any two steps, and in a cluster."""

from __future__ import annotations

from contextlib import ExitStack, closing

import pytest
import redis
from conformance.kinds import SQLITE, Kind
from conformance.meanwhile import Writer, check, name, read_at_once, read_between
from conformance.scene import CALLER, DAY, EVER, LEASE, VALUE, Scene

from idemguard.claim import Begin, Complete
from idemguard.record import Address
from idemguard.stores.redis import RedisStore
from idemguard.stores.sqlite import SqliteStore

AT_ONCE = 4  # things written between two steps of a reader


def on_server(url):
    """A kind of store: on this server."""
    return Kind("redis", lambda _, clock: RedisStore(url, clock=clock), shared=True)


@pytest.mark.parametrize("driver", ["drive", "adrive"])
def test_a_line_that_stands_comes_once_in_a_cluster(cluster, tmp_path, driver):
    with closing(Scene(on_server(cluster.url), tmp_path, driver)) as scene:
        writer = Writer(scene)
        read_between(writer, scene)
        read_at_once(writer, scene)


@pytest.fixture(params=["sqlite", "resp2", "resp3", "cluster"])
def reader(request, tmp_path):
    """A scene, another store on its data, and by what this one does each of its steps."""
    with ExitStack() as stack:
        if request.param == "sqlite":
            scene = stack.enter_context(closing(Scene(SQLITE, tmp_path, "drive")))
            store = SqliteStore(tmp_path / "store.db", clock=scene.clock)
            does = store._file, "read"
        else:
            if request.param == "cluster":
                cluster = request.getfixturevalue("cluster")
                url, client = cluster.url, cluster.client()
            else:
                url = request.getfixturevalue("redis_url")
                client = redis.Redis.from_url(url, protocol=int(request.param[-1]))
                stack.enter_context(closing(client))
            scene = stack.enter_context(closing(Scene(on_server(url), tmp_path, "drive")))
            store = RedisStore(client, clock=scene.clock)
            does = client, "execute_command"
        stack.enter_context(closing(store))
        yield scene, store, *does


@pytest.mark.parametrize("steps", [(0, 1), (0,)], ids=["two-in-one-ms", "all-in-one-ms"])
def test_a_line_that_stands_comes_once_whatever_is_written_between_two_steps(
    reader, steps, monkeypatch
):
    scene, store, whose, step = reader
    writer, plain, taken = Writer(scene, steps), getattr(whose, step), []

    def then_others_write(*args, **options):
        answer = plain(*args, **options)
        taken.append(args)
        for _ in range(AT_ONCE):
            writer.write()
        return answer

    before = {name(line) for line in scene.store.lines(scene.namespace, 0, EVER)}
    monkeypatch.setattr(whose, step, then_others_write)
    given = list(store.lines(scene.namespace, 0, EVER))
    monkeypatch.undo()
    after = {name(line) for line in scene.store.lines(scene.namespace, 0, EVER)}
    assert len(taken) > 2
    assert before - after
    assert before & after > writer.stands
    check(given, before & after)


def test_lines_that_stand_come_once_while_others_are_removed(store, clock):
    stands, gone = set(), []
    for number in range(520):
        address = Address("n", f"a{number:063x}")
        claim = store.perform(Begin(address, "n", CALLER, LEASE)).claim
        if number % 4:
            gone.append(address)
        else:
            stands.add((address.fingerprint, claim.id))
            store.perform(Complete(claim, VALUE, 9 * DAY, LEASE))
        clock.advance(0.001)
    lines = store.lines("n", 0, EVER)
    given = [next(lines)]
    clock.advance(3 * DAY / 1000)
    store.tend(None)
    assert all(store.look(address)[0].kept_until == 0 for address in gone)
    given += lines
    check(given, stands)
