"""The stores that come with idemguard conform."""

from conformance.kinds import MEMORY, SQLITE
from conformance.suite import Conformance


class TestMemory(Conformance):
    kind = MEMORY


class TestSqlite(Conformance):
    kind = SQLITE
