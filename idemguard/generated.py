"""Which values look made for one occasion: times, random ids, random text.

Pure; small numbers and words do not.
"""

from __future__ import annotations

import re
from collections import Counter
from math import log2

EARLIEST, LATEST = 946_684_800, 4_102_444_800  # seconds: the years 2000 to 2100
RANDOM = 16  # characters from which text can be told to be random
LONGEST = 512  # characters of text that is looked at: nobody generates longer ids
MIXED = 3.0  # bits per character that random text has at least, at that length

_TIME = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d([.,]\d+)?)?\s*(Z|[+-]\d\d:?\d\d)?")
_CLOCK = re.compile(r"\d\d:\d\d:\d\d([.,]\d+)?")
_UUID = re.compile(
    r"\{?[0-9a-f]{8}-?[0-9a-f]{4}-?[0-9a-f]{4}-?[0-9a-f]{4}-?[0-9a-f]{12}\}?", re.IGNORECASE
)
_HEX = re.compile(r"(0x)?[0-9a-f]+", re.IGNORECASE)
_BASE = re.compile(r"[A-Za-z0-9+/_-]+={0,2}")
_PREFIX = re.compile(r"[A-Za-z]{1,12}[_-]")


def looks_generated(value: object) -> bool:
    """Whether a value looks like a time, a random UUID, or random hex or base64 text.

    Args:
        value: in its JSON form; a mapping or a list does where all that it holds does.

    """
    if isinstance(value, bool) or value is None:
        return False
    if isinstance(value, (int, float)):
        return _is_moment(value)
    if isinstance(value, str):
        return _is_text(value.strip())
    if isinstance(value, dict):
        return bool(value) and all(map(looks_generated, value.values()))
    return isinstance(value, list) and bool(value) and all(map(looks_generated, value))


def _is_moment(number: float) -> bool:
    """Seconds, or milli-, micro- or nanoseconds, since 1970."""
    return any(EARLIEST * scale <= number <= LATEST * scale for scale in (1, 10**3, 10**6, 10**9))


def _is_text(text: str) -> bool:
    if len(text) > LONGEST:
        return False
    if _TIME.fullmatch(text) or _CLOCK.fullmatch(text) or _UUID.fullmatch(text):
        return True
    if text.replace(".", "", 1).isdecimal():
        return _is_moment(float(text))
    bare = _PREFIX.sub("", text, count=1)  # run_4f2a..., req-7c...
    if _UUID.fullmatch(bare):
        return True
    if len(bare) < RANDOM or not any(sign.isdecimal() for sign in bare):
        return False
    if _HEX.fullmatch(bare):
        return _bits(bare.lower()) >= MIXED - 0.5
    mixed = any(sign.islower() for sign in bare) and any(sign.isupper() for sign in bare)
    return bool(mixed and _BASE.fullmatch(bare)) and _bits(bare) >= MIXED


def _bits(text: str) -> float:
    """Entropy per character."""
    counts = Counter(text).values()
    return -sum(count / len(text) * log2(count / len(text)) for count in counts)
