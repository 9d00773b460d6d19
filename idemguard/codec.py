"""A result as bytes and back: the same value, of the same types at every depth, or none.

PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NoReturn

from idemguard.errors import ResultUnavailableError, StoreError
from idemguard.members import Members
from idemguard.tagged import (
    DEPTH,
    WIDEST,
    Encoder,
    TooLargeError,
    UnreadableError,
    UnstorableError,
    decode,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

ABSENT: Final = object()
FORMAT = 1
_HEADER = "idemguard"
_ATOMS = frozenset({bool, float, type(None)})


@dataclass(frozen=True, slots=True)
class Value:
    """A result as a store keeps it.

    Attributes:
        codec: `"json"` (plain JSON), `"tagged"` (JSON with tags for value types and for
            instances of the classes that the annotation names) or `"unstorable"` (done,
            without a result).
        data: the JSON in UTF-8 with a newline at its end, or the reason in UTF-8.

    """

    codec: str
    data: bytes


class Codec:
    """Turns the results of one callable into bytes and back.

    Plain JSON values and the standard library's value types inside them need no annotation.
    Models, dataclasses, named tuples, enums and attrs classes are stored under the name of
    their class, which must be one that the annotation names, at whatever depth.

    Args:
        annotation: the type of the results; when absent, plain values and value types only.
        where: what the results are of, for messages.

    """

    __slots__ = ("_annotation", "_members", "_where")

    def __init__(self, annotation: object = ABSENT, *, where: str = "") -> None:
        self._annotation: Callable[[], Any] = lambda: annotation
        self._members: Members | None = None
        self._where = where

    @classmethod
    def lazy(cls, annotation: Callable[[], object], *, where: str = "") -> Codec:
        """A codec whose annotation is asked for at its first use.

        Args:
            annotation: answers the type, as in `lambda: get_type_hints(fn)["return"]`; a
                `KeyError` from it says that there is none. When it raises something else
                it is asked again once an instance of an unknown class turns up.
            where: what the results are of, for messages.

        """
        codec = cls(where=where)
        codec._annotation = annotation
        return codec

    def dump(self, value: object, *, limit: int) -> Value:
        """The value as a store keeps it.

        An instance of a class is restored from the bytes once, here, and compared: what comes
        back changed is unstorable. Values without one need no such check, as each of their
        types is written by a rule that loses nothing.

        Args:
            value: a result.
            limit: how many bytes it may need.

        Returns:
            A `Value`; never an error. For what cannot be restored faithfully, or is too large,
            it is `"unstorable"`, and its reason names the type, the place and the option.

        """
        try:
            return self._dump(value, limit)
        except UnstorableError as error:
            reason = str(error)[:2_000]
        except RecursionError:
            reason = "result: nested too deeply; return a flatter value"
        except Exception as error:  # noqa: BLE001 - a body that succeeded must not fail now
            reason = (
                f"result: {type(value).__qualname__} cannot be written ({_words(error)});"
                " return plain values, or name another class with result=…"
            )
        return Value("unstorable", self._told(reason).encode("utf-8", "backslashreplace"))

    def load(self, value: Value) -> Any:
        """The result, as a fresh object each time.

        Args:
            value: what `dump` returned, here or in another process.

        Raises:
            ResultUnavailableError: it is `"unstorable"`; the message is its reason.
            StoreError: the bytes are damaged, foreign, or of another version.

        """
        if value.codec == "unstorable":
            raise ResultUnavailableError(value.data.decode("utf-8", "replace"))
        try:
            return self._load(value)
        except RecursionError:
            problem = "nested too deeply"
        except Exception as error:  # noqa: BLE001 - validators may raise anything
            problem = _words(error)
        raise StoreError(
            self._told(
                f"the stored result cannot be read ({problem}); if the code has changed,"
                " change version=, otherwise forget the task"
            )
        )

    def _told(self, message: str) -> str:
        return f"{self._where}: {message}" if self._where else message

    def _known(self, *, anew: bool = False) -> Members:
        if self._members is None or (anew and self._members.problem):
            try:
                self._members = Members(self._annotation())
            except KeyError:
                self._members = Members(ABSENT)
            except Exception as error:  # noqa: BLE001 - whatever stands in an annotation
                self._members = Members(ABSENT, problem=_words(error))
        return self._members

    def _dump(self, value: object, limit: int) -> Value:
        members = self._known()
        # with classes about, "json" is left to what was written before the annotation named them
        if not members and not members.problem:
            try:
                return Value("json", _fitting(_plain(value, limit), limit))
            except _NotPlainError:
                pass
        try:
            return Value("tagged", _tagged(value, members, limit))
        except UnstorableError:
            if not members.problem:
                raise
        return Value("tagged", _tagged(value, self._known(anew=True), limit))

    def _load(self, value: Value) -> object:
        if value.codec not in {"json", "tagged"}:
            raise UnreadableError(f"its codec {value.codec!r} is unknown")
        tree = _read(value.data)
        members = self._known()
        if value.codec == "json":
            return self._fit(value.data) if members else tree
        return _restored(tree, self._known(anew=True))

    def _fit(self, data: bytes) -> object:
        from pydantic import TypeAdapter  # noqa: PLC0415 - loaded on first need

        return TypeAdapter(self._annotation()).validate_json(data)


class _NotPlainError(Exception):
    """A value is no plain JSON, or too large for it."""


def _refuse(constant: str) -> NoReturn:
    raise UnreadableError(f"{constant} is no JSON")


_encoder = json.JSONEncoder(
    ensure_ascii=False, allow_nan=False, check_circular=False, separators=(",", ":")
)
_decoder = json.JSONDecoder(parse_constant=_refuse)


def _write(tree: object) -> bytes:
    # the newline shows that nothing was cut off, of a number too
    return _encoder.encode(tree).encode() + b"\n"


def _read(data: bytes) -> Any:
    if not data.endswith(b"\n"):
        raise UnreadableError("its end is missing")
    return _decoder.decode(data.decode())


def _fitting(data: bytes, limit: int) -> bytes:
    if len(data) > limit:
        raise TooLargeError(limit)
    return data


def _plain(value: object, limit: int) -> bytes:
    _weigh([value], 0, limit + 2)
    try:
        return _write(value)
    except ValueError as error:  # NaN, infinity, a lone surrogate
        raise _NotPlainError from error


def _weigh(value: list[Any] | dict[Any, Any], depth: int, left: int) -> int:
    # what is left of the bytes at best, for a value that shares its parts may be endless as text
    left -= 2 * len(value)
    if depth > DEPTH:
        raise _NotPlainError
    items: Iterable[Any] = value
    if type(value) is dict:
        for key in value:
            if type(key) is not str:
                raise _NotPlainError
            left -= len(key)
        items = value.values()
    for item in items:
        kind = type(item)
        if kind is str:
            left -= len(item)
        elif kind is dict or kind is list:
            left = _weigh(item, depth + 1, left)
        elif kind is int:
            if not -WIDEST < item < WIDEST:
                raise _NotPlainError
        elif kind not in _ATOMS:
            raise _NotPlainError
    if left < 0:
        raise _NotPlainError
    return left


def _document(tree: object, *, loose: bool = False) -> bytes:
    return _write({_HEADER: FORMAT, "value": tree, **({"loose": True} if loose else {})})


def _restored(document: Any, members: Members) -> object:
    if type(document) is not dict or document.keys() - {"loose"} != {_HEADER, "value"}:
        raise UnreadableError("it was not written by idemguard")
    if document[_HEADER] != FORMAT:
        raise UnreadableError(f"its format {document[_HEADER]!r} is unknown")
    return decode(document["value"], partial(members.together, loose="loose" in document))


def _tagged(value: object, members: Members, limit: int) -> bytes:
    encoder = Encoder(limit, members.apart)
    tree = encoder.tree(value)
    if not encoder.instances:
        return _fitting(_document(tree), limit)
    for loose in (False, True):
        data = _fitting(_document(tree, loose=loose), limit)
        if (flaw := _flaw(tree, encoder.beside, members, loose=loose)) is None:
            return data
    # now that there is one, look for the place
    Encoder(limit, members.apart, partial(_verify, members)).tree(value)
    raise UnstorableError(flaw or "")


def _flaw(tree: object, beside: list[object], members: Members, *, loose: bool) -> str | None:
    # two values are written alike only when they are the same at every depth
    data = _document(tree, loose=loose)
    again = Encoder(2 * len(data), members.apart)
    try:
        written = again.tree(_restored(_read(data), members))
    except Exception as error:  # noqa: BLE001 - validators may raise anything
        return f"cannot be restored ({_words(error)})"
    same = _document(written, loose=loose) == data and again.beside == beside
    return None if same else "comes back changed"


def _verify(members: Members, tree: Any, beside: list[object]) -> None:
    if flaw := _flaw(tree, beside, members, loose=True):
        raise UnstorableError(
            f"{tree['$of'][0]} {flaw}; return plain values, or name another class with result=…"
        )


def _words(error: Exception) -> str:
    try:
        if hasattr(error, "errors"):  # a validation error's own text repeats the payload
            flaws = error.errors(include_url=False, include_context=False, include_input=False)
            places = (f"{'.'.join(map(str, flaw['loc']))}: {flaw['msg']}" for flaw in flaws[:3])
            return f"{error.title}: {'; '.join(places)}"[:500]  # type: ignore[attr-defined]
        if isinstance(error, UnreadableError | UnstorableError):
            return str(error)[:500]
        return f"{type(error).__name__}: {error}"[:500]
    except Exception:  # noqa: BLE001 - a foreign error may be unable to say what it is
        return type(error).__name__
