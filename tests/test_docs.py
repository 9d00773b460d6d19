"""What the documentation says of the server's store is true: its rights, its keys, its URLs."""

from __future__ import annotations

import re
from pathlib import Path

from test_redis_deployments import RIGHTS

from idemguard import Guard
from idemguard.stores import _SERVERS, wire

PAGE = (Path(__file__).parents[1] / "docs" / "redis.md").read_text()


def test_the_rights_are_those_that_suffice():
    block = next(b for b in re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL) if "+evalsha" in b)
    assert set(block.split()) == set(RIGHTS)


def test_every_key_that_there_is_is_told_of(standalone):
    guard = Guard(store=standalone.url, namespace="a b")
    guard.run_task("t", 1, lambda n: n)
    guard.engine.store.tend(None)
    guard.engine.store.secret("a b")
    keys = re.findall(r"`([^` ]+)`", PAGE)
    told = {re.sub(r"(.*}|…):", "", key).split(":")[0] for key in keys}
    with standalone.client() as client:
        for key in client.scan_iter():
            name = key.decode()
            assert re.sub(r".*}:", "", name).split(":")[0] in told | {wire.NAMESPACES.split(":")[0]}
            assert client.pttl(key) > 0, name
    guard.close()


def test_every_kind_of_url_is_told_of():
    for scheme in _SERVERS:
        name = scheme.replace("valkeys", "rediss").replace("valkey", "redis")
        assert f"`{name}://" in PAGE, scheme
