"""What is set, and where: argument, then `configure()`, then environment, then default.

PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict

from idemguard.errors import ConfigurationError
from idemguard.guard import Policy
from idemguard.pricing import Pricer, price_by
from idemguard.record import Mode
from idemguard.stores import Client, Store, as_store, open_store

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import TracerProvider

    from idemguard.usage import Price

Seconds: TypeAlias = "float | timedelta"

DAY = 86_400.0
LONGEST = 1e12  # seconds: any store can add it to its clock
MODES = ("enforce", "observe", "off")
SHARED_NOTHING = {
    "KUBERNETES_SERVICE_HOST": "Kubernetes",
    "AWS_LAMBDA_FUNCTION_NAME": "Lambda",
    "K_SERVICE": "Cloud Run",
    "CLOUD_RUN_JOB": "Cloud Run",
}
ROOT_MARKS = ("pyproject.toml", "setup.cfg", ".git")


class Policies(TypedDict, total=False):
    """What can be said of a guard, and of one callable; absent and None are the same."""

    ttl: Seconds | None
    lease: Seconds | None
    max_run: Seconds | str | None
    wait_timeout: Seconds | None
    on_timeout: str | None
    on_lost: str | None
    on_store_error: str | None
    mode: str | None


class Given(Policies, total=False):
    """The keywords of a guard."""

    store: str | Store | Client | None
    namespace: str | None
    volatile: Collection[str]
    pricer: Pricer | None
    max_result_bytes: int | None
    retention: Seconds | None
    window_retention: Seconds | None
    field_digests: bool | None
    tracer_provider: TracerProvider | None
    meter_provider: MeterProvider | None
    record_exceptions: bool | None
    gen_ai_usage: bool | None


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a guard is set to; absent is None, and counts as the default shown beside it."""

    store: str | Store | Client | None = None  # IDEMGUARD_STORE, then .idemguard/idemguard.db
    namespace: str | None = None  # IDEMGUARD_NAMESPACE, then "default"
    volatile: Collection[str] = ()  # more names to drop from every payload
    ttl: Seconds | None = None  # 900
    lease: Seconds | None = None  # 30
    max_run: Seconds | str | None = None  # 3600
    wait_timeout: Seconds | None = None  # as long as the leader lives
    on_timeout: str | None = None  # "fallback"
    on_lost: str | None = None  # "rerun"
    on_store_error: str | None = None  # "raise"
    mode: str | None = None  # "enforce"
    pricer: Pricer | None = None  # IDEMGUARD_PRICER, then nothing is priced
    max_result_bytes: int | None = None  # 8 MiB
    retention: Seconds | None = None  # 24 h
    window_retention: Seconds | None = field(default=8 * DAY)  # None: for ever
    field_digests: bool | None = None  # True
    tracer_provider: TracerProvider | None = None  # the global one
    meter_provider: MeterProvider | None = None  # the global one
    record_exceptions: bool | None = None  # False
    gen_ai_usage: bool | None = None  # False


POLICIES = tuple(sorted(Policies.__optional_keys__))
_CHOICES = {
    "on_timeout": ("fallback", "raise"),
    "on_lost": ("rerun", "raise"),
    "on_store_error": ("raise", "run"),
    "mode": MODES,
}
_DEFAULT_LIMIT = 8 * 1024 * 1024


def settings(given: Mapping[str, Any]) -> Settings:
    """Settings from keywords, checked.

    Raises:
        ConfigurationError: a keyword that there is not, or a value that cannot be; it is named.

    """
    names = {f.name for f in fields(Settings)}
    if unknown := sorted(given.keys() - names):
        raise ConfigurationError(
            f"no such setting: {', '.join(unknown)}; there are {', '.join(sorted(names))}"
        )
    found = Settings(**given)
    policy(found, {})
    price_by(found.pricer)
    if found.store is not None:
        as_store(found.store)  # opens nothing yet, but says what is wrong with it
    if found.namespace is not None:
        text("namespace", found.namespace)
    limit = found.max_result_bytes
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit <= 0):
        raise ConfigurationError(f"max_result_bytes= takes a number of bytes > 0, not {limit!r}")
    if found.retention is not None:
        milliseconds("retention", found.retention, least=1)
    if found.window_retention is not None:
        milliseconds("window_retention", found.window_retention, least=1)
    for name in ("field_digests", "record_exceptions", "gen_ai_usage"):
        if getattr(found, name) not in (None, True, False):
            raise ConfigurationError(f"{name}= takes True or False, not {getattr(found, name)!r}")
    for name, method in (("tracer_provider", "get_tracer"), ("meter_provider", "get_meter")):
        provider = getattr(found, name)
        if provider is not None and not callable(getattr(provider, method, None)):
            raise ConfigurationError(
                f"{name}= takes a provider of OpenTelemetry, which has {method}(), not {provider!r}"
            )
    volatile = found.volatile
    if isinstance(volatile, str) or not isinstance(volatile, Collection):
        raise ConfigurationError(f"volatile= takes a collection of names, not {volatile!r}")
    for name in volatile:
        text("volatile", name)
    return found


def policy(base: Settings, given: Mapping[str, Any]) -> Policy:
    """The policy of one decorated function; an argument that is None counts as not given.

    Args:
        base: the guard's settings.
        given: the decorator's arguments, those of `POLICIES` alone.

    Raises:
        ConfigurationError: a value that cannot be; it is named.

    """
    chosen = {name: getattr(base, name) for name in POLICIES}
    chosen |= {name: value for name, value in given.items() if value is not None}
    for name, choices in _CHOICES.items():
        if chosen[name] is not None and chosen[name] not in choices:
            raise ConfigurationError(
                f"{name}= takes {' or '.join(map(repr, choices))}, not {chosen[name]!r}"
            )
    found = Policy()
    if (ttl := chosen["ttl"]) is not None:
        found = replace(found, ttl=milliseconds("ttl", ttl, least=0))
    if (lease := chosen["lease"]) is not None:
        found = replace(found, lease=milliseconds("lease", lease, least=1))
    if (longest := chosen["max_run"]) is not None:
        auto = isinstance(longest, str) and longest == "auto"
        found = replace(found, max_run=None if auto else milliseconds("max_run", longest, least=1))
    if (patience := chosen["wait_timeout"]) is not None:
        found = replace(found, wait_timeout=milliseconds("wait_timeout", patience, least=0))
    retention = base.retention if base.retention is not None else DAY
    return replace(
        found,
        fall_back=chosen["on_timeout"] != "raise",
        rerun_lost=chosen["on_lost"] != "raise",
        run_unguarded=chosen["on_store_error"] == "run",
        mode=Mode.OBSERVE if chosen["mode"] == "observe" else Mode.ENFORCE,
        observes=chosen["mode"] == "observe",
        retention=max(milliseconds("retention", retention, least=1), found.ttl),
    )


def mode(base: Settings, given: str | None) -> str:
    """`enforce`, `observe` or `off`: `IDEMGUARD_MODE` outranks code, it is the kill switch.

    Raises:
        ConfigurationError: the environment names no mode.

    """
    if there := os.environ.get("IDEMGUARD_MODE"):
        if there not in MODES:
            raise ConfigurationError(f"IDEMGUARD_MODE takes {', '.join(MODES)}, not {there!r}")
        return there
    return given or base.mode or "enforce"


def milliseconds(name: str, value: object, *, least: int) -> int:
    """A time given in seconds, or as a timedelta, in whole ms; rounded up.

    Args:
        name: of the argument, for the error.
        value: what was given.
        least: the shortest that makes sense, ms.

    Raises:
        ConfigurationError: it is no time, or a shorter one.

    """
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
        more = ' or "auto"' if name == "max_run" else ""
        raise ConfigurationError(
            f"{name}= takes seconds (a number or a timedelta){more}, not {value!r}"
        )
    if not 0 <= seconds <= LONGEST or math.ceil(seconds * 1000) < least:
        bound = "0" if least == 0 else "more than 0"
        raise ConfigurationError(f"{name}= takes {bound} to {LONGEST:.0e} seconds, not {value!r}")
    return math.ceil(seconds * 1000)


def text(name: str, value: object) -> str:
    """A text that is not empty and can be stored.

    Raises:
        ConfigurationError: it is none; the argument is named.

    """
    if not isinstance(value, str) or not value:
        raise ConfigurationError(f"{name}= takes a text that is not empty, not {value!r}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ConfigurationError(f"{name}= is no valid Unicode: {value!r}") from None
    return value


def limit(base: Settings) -> int:
    """How large a stored result may be, bytes."""
    return base.max_result_bytes if base.max_result_bytes is not None else _DEFAULT_LIMIT


def price(base: Settings) -> Price | None:
    """How usage is priced: as set, else as `IDEMGUARD_PRICER` says, else not at all.

    Raises:
        ConfigurationError: the environment names no pricer.

    """
    if base.pricer is not None:
        return price_by(base.pricer)
    return price_by(os.environ.get("IDEMGUARD_PRICER") or None)


def namespace(base: Settings) -> str:
    """Set, else `IDEMGUARD_NAMESPACE`, else "default"."""
    return base.namespace or os.environ.get("IDEMGUARD_NAMESPACE") or "default"


def store(base: Settings) -> Store:
    """Set, else `IDEMGUARD_STORE`, else the file of the project that is worked in.

    Raises:
        ConfigurationError: nothing is set where a file on one machine would share nothing.

    """
    named = base.store if base.store is not None else os.environ.get("IDEMGUARD_STORE") or None
    if named is not None:
        return as_store(named)
    for mark, where in SHARED_NOTHING.items():
        if os.environ.get(mark):
            raise ConfigurationError(
                f"no store is configured, and in {where} the default, a file on one machine, would "
                "share nothing: set IDEMGUARD_STORE, or configure(store=...)"
            )
    return open_store(f"sqlite:///{project_root() / '.idemguard' / 'idemguard.db'}")


def project_root() -> Path:
    """The nearest folder upwards that looks like a project's, else the current one."""
    here = Path.cwd()
    for folder in (here, *here.parents):
        if any((folder / mark).exists() for mark in ROOT_MARKS):
            return folder
    return here
