"""Which values look made for one occasion: times, random ids, random text.

Pure; small numbers and words do not.
PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import re
from collections import Counter
from itertools import pairwise
from math import log2

# seconds: the years 2015 to 2033; wider, numbers of telephones and of articles look like times
EARLIEST, LATEST = 1_420_070_400, 2_000_000_000
RANDOM = 16  # characters from which text can be told to be random
LONGEST = 256  # characters of text that is looked at: nobody generates longer ids
LEAST = 8  # as a time of day
SPACED = 40  # and of text with a space in it: longer than any time
PARTS = 8  # of a mapping or a list that is looked at: more are data
MIXED = 3.0  # bits per character that random text has at least, at that length
# of its neighbours inside a word, those that are of two kinds: capital, small, digit
TURNS, HEX_TURNS = 0.4, 0.1
DIGITS = 15  # of a fraction that nobody wrote down

_TIME = re.compile(r"\d{4}(-?)\d\d\1\d\d[T ]\d\d:?\d\d(:?\d\d([.,]\d+)?)?\s*(Z|[+-]\d\d:?\d\d)?")
_CLOCK = re.compile(r"\d\d:\d\d:\d\d([.,]\d+)?")
_UUID = re.compile(
    r"\{?[0-9a-f]{8}-?[0-9a-f]{4}-?[0-9a-f]{4}-?[0-9a-f]{4}-?[0-9a-f]{12}\}?", re.IGNORECASE
)
_ULID = re.compile(r"[0-7](?=[0-9]*[A-Z])[0-9A-HJKMNP-TV-Z]{25}", re.IGNORECASE)
_HEX = re.compile(r"(0x)?[0-9a-f]+", re.IGNORECASE)
_BASE = re.compile(r"[A-Za-z0-9+/_-]+={0,2}")
_DIGIT = re.compile(r"\d")
_PREFIX = re.compile(r"[A-Za-z]{1,12}[_-]")


def looks_generated(value: object) -> bool:
    """Whether a value looks like a time, a random UUID, or random hex or base64 text.

    Args:
        value: in its JSON form; a mapping or a list does where all that it holds does.

    """
    if isinstance(value, bool) or value is None:
        return False
    if isinstance(value, (int, float)):
        return _is_moment(value) or (isinstance(value, float) and _is_long(value))
    if isinstance(value, str):
        return _is_text(value.strip())
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list) or not 0 < len(value) <= PARTS:
        return False
    return all(map(looks_generated, value))


def _is_moment(number: float) -> bool:
    """Seconds, or milli-, micro- or nanoseconds, since 1970."""
    return any(EARLIEST * scale <= number < LATEST * scale for scale in (1, 10**3, 10**6, 10**9))


def _is_long(number: float) -> bool:
    """A fraction with as many digits as only a computer gives it."""
    return not number.is_integer() and sum(map(str.isdecimal, repr(number).split("e")[0])) > DIGITS


def _is_text(text: str) -> bool:
    if not LEAST <= len(text) <= LONGEST or not _DIGIT.search(text):
        return False
    if len(text) > SPACED and " " in text:
        return False
    if _TIME.fullmatch(text) or _CLOCK.fullmatch(text) or _UUID.fullmatch(text):
        return True
    if text.replace(".", "", 1).isdecimal():
        return text[0] != "0" and _is_moment(float(text))
    prefix = _PREFIX.match(text)  # run_4f2a..., req-7c...
    bare = text if prefix is None else text[prefix.end() :]
    if _UUID.fullmatch(bare) or _ULID.fullmatch(bare):
        return True
    if len(bare) < RANDOM:
        bare = text
    if len(bare) < RANDOM or not _DIGIT.search(bare):
        return False
    if _HEX.fullmatch(bare):
        return _bits(bare.lower()) >= MIXED - 0.5 and _turns(bare.lower()) >= HEX_TURNS
    return (
        bool(_BASE.fullmatch(bare))
        and _bits(bare) >= MIXED
        and (_turns(bare if bare.isalnum() else text) >= TURNS)
    )


def _bits(text: str) -> float:
    """Entropy per character."""
    counts = Counter(text).values()
    return -sum(count / len(text) * log2(count / len(text)) for count in counts)


def _turns(text: str) -> float:
    """How often it changes between capitals, small letters and digits; inside words alone."""
    kinds = [[_kind(sign) for sign in word] for word in re.split("[-_+/=]", text)]
    pairs = [pair for word in kinds for pair in pairwise(word)]
    return sum(one != other for one, other in pairs) / max(1, len(pairs))


def _kind(sign: str) -> int:
    return sign.isupper() + 2 * sign.isdecimal()
