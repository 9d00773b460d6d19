"""An error says what happened, to which task, who holds it and what to do, and survives a pickle; a warning is a log record."""

from __future__ import annotations

import copy
import inspect
import logging
import pickle
import re
import subprocess
import sys
import warnings

import pytest

import idemguard
from idemguard import errors, log

FINGERPRINT = "0123456789abcdef" * 4
ALL = [getattr(errors, name) for name in errors.__all__]
ABOUT_A_HOLDER = [
    errors.WaitTimeoutError,
    errors.UnknownOutcomeError,
    errors.LeaseLostError,
    errors.ResultUnavailableError,
]


def filled(kind):
    """An error with all that it can have."""
    given = {"task_type": "t", "fingerprint": FINGERPRINT}
    if kind is errors.FingerprintError:
        given |= {"parameter": "doc", "path": "doc.meta[3].client"}
    if kind in ABOUT_A_HOLDER:
        given |= {"worker": "w-1", "execution_id": "17-ab"}
    return kind("what happened", **given), given


# --- the tree --------------------------------------------------------------------------------------


def test_every_error_is_public_and_of_one_family():
    there = {
        name
        for name, found in vars(errors).items()
        if inspect.isclass(found) and issubclass(found, Exception) and not name.startswith("_")
    }
    assert there == set(errors.__all__)
    assert all(issubclass(kind, errors.IdemguardError) for kind in ALL)
    assert issubclass(errors.StoreUnavailableError, errors.StoreError)
    assert not issubclass(idemguard.OutOfScope, errors.IdemguardError)


def test_the_tree_in_the_docstring_is_the_tree():
    drawn = re.findall(r"[A-Z]\w+Error", errors.__doc__)
    assert sorted(drawn) == sorted(errors.__all__)


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_an_error_survives_a_pickle_with_its_attributes(kind, protocol):
    error, given = filled(kind)
    error.add_note("and a note")
    found = pickle.loads(pickle.dumps(error, protocol))
    assert type(found) is kind
    assert str(found) == "what happened"
    assert {name: getattr(found, name) for name in given} == given
    assert found.__notes__ == ["and a note"]
    assert vars(copy.deepcopy(error)) == vars(copy.copy(error)) == vars(error)


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_an_error_needs_nothing_but_a_message(kind):
    for error in (kind(), kind("what happened")):
        assert error.task_type is None
        assert error.fingerprint is None
        pickle.loads(pickle.dumps(error))


class OwnError(errors.UnknownOutcomeError):
    """As an application may have one."""

    def __init__(self, code: int) -> None:
        super().__init__(f"code {code}", worker="w-1")
        self.code = code


def test_a_derived_error_survives_as_well():
    found = pickle.loads(pickle.dumps(OwnError(7)))
    assert (type(found), str(found), found.code, found.worker) == (OwnError, "code 7", 7, "w-1")


def test_out_of_scope_survives_a_pickle():
    assert str(pickle.loads(pickle.dumps(idemguard.OutOfScope("not mine")))) == "not mine"


def test_an_error_crosses_to_another_process():
    error, _ = filled(errors.WaitTimeoutError)
    script = (
        "import pickle, sys; error = pickle.load(sys.stdin.buffer); "
        "print(type(error).__name__, error, error.worker, error.fingerprint[:4])"
    )
    told = subprocess.run(
        [sys.executable, "-c", script], input=pickle.dumps(error), capture_output=True, check=True
    )
    assert told.stdout.decode().strip() == "WaitTimeoutError what happened w-1 0123"


# --- what is warned of -----------------------------------------------------------------------------


@pytest.fixture
def records(caplog):
    """The log records so far."""
    caplog.set_level(logging.DEBUG)
    return lambda: caplog.records


def test_a_warning_is_a_record_of_our_logger(records):
    with warnings.catch_warnings(record=True) as through_warnings:
        warnings.simplefilter("always")
        log.warn("kind", "%s happened", "it")
    assert through_warnings == []
    (record,) = records()
    assert (record.name, record.levelname) == ("idemguard", "WARNING")
    assert record.getMessage() == "it happened"


def test_a_kind_is_warned_of_once_a_minute(records, monkeypatch):
    now = [5.0]
    monkeypatch.setattr("idemguard.log.time.monotonic", lambda: now[0])
    log.warn("kind", "first")
    now[0] = 64.9
    log.warn("kind", "too soon")
    log.warn("another", "another kind")
    now[0] = 65.0
    log.warn("kind", "a minute later")
    assert [r.getMessage() for r in records()] == ["first", "another kind", "a minute later"]


def test_no_call_warns_through_warnings(guard, shape, caplog):
    """Of what is warned of most: a result that cannot be stored, and usage that cannot be read."""

    def body(n):
        idemguard.record_usage(input_tokens=-1)
        return object()

    task = shape.guarded(guard, body, task_type="t")
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        task(1)
    assert found == []
    assert len([r for r in caplog.records if r.name == "idemguard"]) == 2


def test_nothing_is_printed_where_no_logging_is_set_up():
    script = (
        "import idemguard\n"
        "guard = idemguard.Guard(store='memory://')\n"
        "guard.idempotent(lambda n: object(), task_type='t')(1)\n"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True, text=True)
    assert (ran.stdout, ran.stderr) == ("", "")


# --- what an error of a call says ------------------------------------------------------------------


def test_an_error_of_a_call_shows_no_payload(guard, shape):
    secret = "sk-very-secret"
    task = shape.guarded(guard, lambda to, n: n, task_type="t", key=lambda bound: bound["to"])
    task(secret, 1)
    with pytest.raises(errors.KeyConflictError) as caught:
        task(secret, 2)
    assert secret not in str(caught.value)


def test_the_own_error_of_a_body_has_no_frame_of_a_context_that_never_was(guard, shape):
    """A caller that prints its exception sees its own chain, and nothing of ours in it."""

    def body(n):
        try:
            {}["inner"]
        except KeyError as inner:
            raise ValueError("outer") from inner

    with pytest.raises(ValueError, match="outer") as caught:
        shape.guarded(guard, body, task_type="t")(1)
    assert isinstance(caught.value.__cause__, KeyError)
    assert caught.value.__cause__ is caught.value.__context__
    assert caught.value.__context__.__context__ is None
