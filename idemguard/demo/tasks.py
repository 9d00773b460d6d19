"""What is done to a document, and how many tokens that takes.

PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

LARGE, SMALL = "demo-large", "demo-small"
# invented, in dollars per million tokens
PRICES = {LARGE: {"input": "3", "output": "15"}, SMALL: {"input": "1", "output": "5"}}
COUNTED = "one token for every six letters of a word, or part of six, and one for every other sign"

HEAD_LINES, HEAD_LETTERS = 3, 160  # what a cheap task sees of a document
LONGEST = 200  # letters of a fact
QUICK = 0.1  # a small model's latency as a share of a large one's

_TOKEN = re.compile(r"\w{1,6}|[^\w\s]")
_WORD = re.compile(r"[^\W\d_]+(?:['’-][^\W\d_]+)*")
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[^\W\d_]|\d)|\n+")
_FIGURE = re.compile(
    r"[$€£]\s?\d[\d.,]*\d|\d[\d.,:-]*\d|\d"  # amounts, dates, times, numbers
)
_MONTHS = (
    "January|February|March|April|May|June|July|August|September|October|November|December|"
    "Januar|Februar|März|Mai|Juni|Juli|Oktober|Dezember"
)
_DATE = re.compile(
    rf"\d{{4}}-\d\d-\d\d|\d{{1,2}}\.? (?:{_MONTHS})(?: \d{{4}})?|(?:{_MONTHS}) \d{{4}}"
)
_NAME = re.compile(r"(?:[A-ZÄÖÜ][\w'’-]+ )+[A-ZÄÖÜ][\w'’-]+")


def _set(text: str) -> frozenset[str]:
    return frozenset(text.split())


_COMMON = {
    "English": _set(
        "the a an and or of to in on at by for with from is was are were be been it its that "
        "this as not no we our they their he she his her you your has have had will would can "
        "may should which who what when where how if but so than then there all one two only "
        "more most also about after before into out up"
    ),
    "German": _set(
        "der die das und oder von zu in im auf an am bei für mit aus ist war sind ein eine "
        "einen nicht kein wir sie er es den dem des nach wird werden hat haben noch nur wer "
        "was wenn aber als auch bis zum zur sich"
    ),
    "French": _set(
        "le la les un une et ou de du des à en sur pour avec est sont ne pas nous vous ils "
        "elle il que qui dans au aux ce cette plus"
    ),
    "Spanish": _set(
        "el la los las un una y o de del a en por para con es son no nos que quien se su más "
        "como pero al lo"
    ),
}
_EVERY_COMMON = frozenset().union(*_COMMON.values())

_TAGS = {
    "incident": ("incident", "severity", "outage", "postmortem"),
    "meeting": ("meeting", "minutes", "present", "protokoll", "agenda"),
    "contract": ("lease", "contract", "agreement", "landlord", "parties"),
    "release": ("release", "version", "upgrade", "released"),
    "research": ("research", "memo", "field", "interviews", "study", "campaign"),
    "questions": ("questions", "faq", "asked", "support"),
    "policy": ("rules", "policy", "proposal"),
}
_GOOD = _set("new good better thank success agreed fixed saved welcome improved")
_BAD = _set("slow failed incident fails error wrong lost late twice stops problem")


@dataclass(frozen=True)
class Kind:
    """A task type.

    Attributes:
        name: of it.
        prompt: what the model would be asked; its tokens count.
        do: the answer, from the text.
        whole: whether it is costly: it sees the whole text, and a large model does it.

    """

    name: str
    prompt: str
    do: Callable[[str], Any]
    whole: bool = False

    @property
    def model(self) -> str:
        """Who does it."""
        return LARGE if self.whole else SMALL

    def latency(self, delay: float) -> float:
        """How long it takes, where a large model takes `delay` seconds."""
        return delay if self.whole else delay * QUICK


@dataclass(frozen=True)
class Digest:
    """An answer, and what it took.

    Attributes:
        answer: plain JSON values.
        input_tokens: of the prompt and of the text that was seen.
        output_tokens: of the answer.

    """

    answer: Any
    input_tokens: int
    output_tokens: int


def digest(kind: Kind, text: str) -> Digest:
    """Do one task on a document."""
    seen = text if kind.whole else head(text)
    answer = kind.do(seen)
    said = answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)
    return Digest(answer, tokens(kind.prompt) + tokens(seen), tokens(said))


def tokens(text: str) -> int:
    """How many tokens a text has, as `COUNTED` says."""
    return sum(1 for _ in _TOKEN.finditer(text))


def head(text: str) -> str:
    """The first lines of a text that are not empty, or less where they are long."""
    lines = (line.strip() for line in text.splitlines())
    first: list[str] = []
    for line in lines:
        if line:
            first.append(line)
        if len(first) == HEAD_LINES:
            break
    return "\n".join(first)[:HEAD_LETTERS]


def words(text: str) -> list[str]:
    """The words of a text, in lower case."""
    return [word.lower() for word in _WORD.findall(text)]


def sentences(text: str) -> list[str]:
    """The sentences of a text; a line that ends without a full stop is one as well."""
    return [part for piece in _SENTENCE_END.split(text) if (part := piece.strip())]


# --- on the whole text -------------------------------------------------------------------------------


def summarise(text: str) -> str:
    """The sentences whose words are the most frequent in the text, in their own order."""
    counts = Counter(word for word in words(text) if word not in _EVERY_COMMON)
    scored = []
    for place, sentence in enumerate(sentences(text)):
        telling = {word for word in words(sentence) if word in counts}
        length = max(8, len(_WORD.findall(sentence)))  # a short one must not win by being short
        score = sum(counts[word] for word in telling) / length
        scored.append((-score, place, sentence))
    wanted = min(7, max(2, len(scored) // 6))
    best = sorted(scored)[:wanted]
    return " ".join(sentence for _, _, sentence in sorted(best, key=lambda found: found[1]))


def extract_facts(text: str) -> list[dict[str, str]]:
    """The figures of the text, each with the words around it; those of the richest sentences."""
    found = [(sentence, list(_FIGURE.finditer(sentence))) for sentence in sentences(text)]
    rich = sorted((pair for pair in found if pair[1]), key=lambda pair: -len(pair[1]))[:12]
    facts = []
    for sentence, figures in rich:
        for figure in figures[:2]:
            before = sentence[: figure.start()].split(" ")[-4:]
            after = sentence[figure.end() :].split(" ")[:4]
            about = " ".join(before) + figure.group() + " ".join(after)
            facts.append({"figure": figure.group(), "about": about.strip()[:LONGEST]})
    return facts


# --- on the first lines ------------------------------------------------------------------------------


def title(text: str) -> str:
    """The first line, without its marks."""
    return text.partition("\n")[0].strip("#*=- \t")


def slug(text: str) -> str:
    """The title as a file's name."""
    return "-".join(words(title(text))[:6])


def language(text: str) -> str:
    """The language whose commonest words are the most frequent."""
    counts = Counter(words(text))
    scores = {name: sum(counts[word] for word in common) for name, common in _COMMON.items()}
    best = max(scores, key=scores.__getitem__)
    return best if scores[best] else "unknown"


def date(text: str) -> str:
    """The first date."""
    found = _DATE.search(text)
    return found.group() if found else "none"


def tag(text: str) -> str:
    """What kind of document it is, by its words."""
    counts = Counter(words(text))
    scores = {name: sum(counts[word] for word in telling) for name, telling in _TAGS.items()}
    best = max(scores, key=scores.__getitem__)
    return best if scores[best] else "other"


def tone(text: str) -> str:
    """Whether it is good news."""
    found = words(text)
    score = sum(word in _GOOD for word in found) - sum(word in _BAD for word in found)
    return "good" if score > 0 else "bad" if score < 0 else "neutral"


def keywords(text: str) -> list[str]:
    """The four longest words that are not common ones."""
    telling = dict.fromkeys(word for word in words(text) if word not in _EVERY_COMMON)
    return sorted(telling, key=lambda word: (-len(word), word))[:4]


def name(text: str) -> str:
    """The first name of several words."""
    found = _NAME.search(text)
    return found.group() if found else "none"


def level(text: str) -> str:
    """How hard it is to read, by the length of its words."""
    found = words(text)
    mean = sum(map(len, found)) / len(found) if found else 0.0
    return "easy" if mean < 4.5 else "medium" if mean < 6 else "hard"  # noqa: PLR2004 - a rule of thumb


KINDS = {
    kind.name: kind
    for kind in (
        Kind(
            "summarise",
            "Summarise the document in its own sentences. Keep names and figures as they are.",
            summarise,
            whole=True,
        ),
        Kind(
            "extract_facts",
            "List the figures of the document as JSON, each with the words that say what it is.",
            extract_facts,
            whole=True,
        ),
        Kind("title", "Give it a title.", title),
        Kind("slug", "Give it a file name.", slug),
        Kind("language", "Which language?", language),
        Kind("date", "Of which date?", date),
        Kind("tag", "What kind of document?", tag),
        Kind("tone", "Good news or bad?", tone),
        Kind("keywords", "Four keywords.", keywords),
        Kind("name", "Whose name comes first?", name),
        Kind("level", "How hard to read?", level),
    )
}
COSTLY = tuple(kind.name for kind in KINDS.values() if kind.whole)
CHEAP = tuple(kind.name for kind in KINDS.values() if not kind.whole)
