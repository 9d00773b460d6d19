"""The servers that tests ask for by name."""

from __future__ import annotations

import itertools

import pytest
from servers.cluster import Cluster
from servers.proxy import Proxy
from servers.sentinel import Sentinels
from servers.server import Server

DATABASES = 10_000  # more than there are tests

_databases = itertools.count(1)


@pytest.fixture(scope="session")
def _standalone():
    with Server("--databases", DATABASES) as server:
        yield server


@pytest.fixture
def standalone(_standalone):
    """A server, empty and as it was at first; it is everybody's, so it is not killed."""
    _standalone.reset()
    return _standalone


@pytest.fixture
def redis_url(standalone):
    """A database of `standalone` that no other test sees, nor what another one left running."""
    return standalone.url.removesuffix("/0") + f"/{next(_databases) % DATABASES}"


@pytest.fixture
def own_server():
    """A server of the test's own that keeps what it wrote, to be killed, frozen, restarted."""
    with Server("--appendonly", "yes", "--appendfsync", "always") as server:
        yield server


@pytest.fixture
def proxy(standalone):
    """A proxy in front of `standalone`."""
    with Proxy(standalone) as made:
        yield made


@pytest.fixture
def tls_proxy(standalone):
    """The same, with TLS."""
    with Proxy(standalone, tls=True) as made:
        yield made


@pytest.fixture(scope="session")
def _cluster():
    with Cluster() as made:
        yield made


@pytest.fixture
def cluster(_cluster):
    """Three primaries, empty and as they were at first; everybody's."""
    _cluster.reset()
    return _cluster


@pytest.fixture(scope="session")
def _proxied_cluster():
    with Cluster(announce_proxies=True) as made:
        yield made


@pytest.fixture
def proxied_cluster(_proxied_cluster):
    """The same, with a proxy in front of each."""
    _proxied_cluster.reset()
    return _proxied_cluster


@pytest.fixture
def own_cluster(request):
    """A cluster of the test's own with a replica each; the fixture's parameter has other options."""
    with Cluster(**getattr(request, "param", {"replicas": 1})) as made:
        yield made


@pytest.fixture
def sentinel(request):
    """A primary, a replica and a sentinel; the fixture's parameter has other options."""
    with Sentinels(**getattr(request, "param", {})) as made:
        yield made
