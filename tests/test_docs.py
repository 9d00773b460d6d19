"""What the documentation says of the server's store is true: its rights, its keys, its URLs, its code."""

from __future__ import annotations

import gc
import re
import subprocess
import sys
from pathlib import Path

import pytest
from servers.server import HOST
from test_readme import pieces
from test_redis_deployments import RIGHTS

from idemguard import Guard, Task
from idemguard.errors import StoreError
from idemguard.stores import _SERVERS, wire

PAGES = sorted((Path(__file__).parents[1] / "docs").glob("*.md"))
PAGE = (Path(__file__).parents[1] / "docs" / "redis.md").read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_code_runs_and_prints_what_is_shown(page, standalone, cluster, sentinel, tmp_path):
    found = list(pieces(page.read_text()))
    code = "\n".join(piece for kind, piece in found if kind == "code")
    for shown, there in (
        ("redis.example:6379", f"{HOST}:{standalone.port}"),
        ('"redis.example", port=6379', f'"{HOST}", port={standalone.port}'),
        ('"cluster-1.example", port=6379', f'"{HOST}", port={cluster.ports[0]}'),
        ('("sentinel-1.example", 26379)', f'("{HOST}", {sentinel.watchers[0].port})'),
    ):
        code = code.replace(shown, there)
    assert ".example" not in code
    script = tmp_path / "page.py"
    script.write_text(code)
    ran = subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "".join(piece for kind, piece in found if kind == "output")


def _rights(sign):
    """The words of the block that holds this one."""
    blocks = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
    return next(block.split() for block in blocks if sign in block.split())


def test_the_rights_are_those_that_suffice():
    assert set(_rights("+evalsha")) == set(RIGHTS)


# a RedisCluster that is refused in its constructor leaves its socket to the garbage collector
@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
@pytest.mark.parametrize("left_out", [None, "+cluster|slots", "+command", "+asking"])
def test_a_cluster_needs_the_rights_that_are_named_for_it_and_no_others(cluster, left_out):
    rights = [*_rights("+evalsha"), *(r for r in _rights("+asking") if r != left_out)]
    for node in cluster.nodes:
        node.tell("ACL", "SETUSER", "agent", "reset", "on", ">pw", *rights)
    guard = Guard(store=cluster.url.replace("://", "://agent:pw@"), namespace="rights")
    fingerprint = "0" * 64
    slot = cluster.slot(wire.shard("rights", fingerprint[0]))
    try:
        if left_out in ("+cluster|slots", "+command"):
            with pytest.raises(StoreError, match="refused"):
                guard.run_task("t", 1, lambda n: n)
            return
        assert guard.run_task("t", 1, lambda n: n).source == "executed"
        old = cluster.owner(slot)
        new = cluster.other(old)
        new.tell("CLUSTER", "SETSLOT", slot, "IMPORTING", old.id)
        old.tell("CLUSTER", "SETSLOT", slot, "MIGRATING", new.id)
        try:
            if left_out:
                with pytest.raises(StoreError, match="'asking'"):
                    guard.ledger.record(fingerprint, "w")
            else:
                assert guard.ledger.record(fingerprint, "w") == 1
        finally:
            old.tell("CLUSTER", "SETSLOT", slot, "STABLE")
            new.tell("CLUSTER", "SETSLOT", slot, "STABLE")
    finally:
        guard.close()
        for node in cluster.nodes:
            node.tell("ACL", "DELUSER", "agent")
        gc.collect()


def test_only_who_waits_needs_the_channels(standalone):
    with standalone.client() as root:
        rights = [right for right in RIGHTS if not right.startswith("&")]
        root.execute_command("ACL", "SETUSER", "mute", "reset", "on", ">pw", *rights)
        guard = Guard(store=f"redis://mute:pw@{HOST}:{standalone.port}/0", namespace="mute")
        try:
            assert guard.run_task("t", 1, lambda n: n).source == "executed"
            assert guard.run_task("t", 1, lambda n: n).source == "reused"
            task = Task.of("t", 2)
            claim = guard.claim(task)
            with pytest.raises(StoreError, match="&idemguard"):
                guard.wait_result(task, 5)
            claim.release()
        finally:
            guard.close()
            root.execute_command("ACL", "DELUSER", "mute")


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
