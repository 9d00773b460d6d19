"""The stores that come with idemguard conform."""

import pytest
from conformance.kinds import MEMORY, REDIS, SQLITE
from conformance.suite import Conformance


class TestMemory(Conformance):
    kind = MEMORY


class TestSqlite(Conformance):
    kind = SQLITE


class TestRedis(Conformance):
    kind = REDIS

    @pytest.fixture(autouse=True)
    def server(self, redis_url, tmp_path_factory):
        """Where the URL of a real server is to be found, on which upkeep finds no other tests' tasks."""
        (tmp_path_factory.getbasetemp() / "redis-url").write_text(redis_url)
