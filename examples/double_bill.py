"""Three workers read overlapping documents: what that costs, and what it costs with claims.

    python examples/double_bill.py [FOLDER]

First in observe mode, which only counts; then in enforce mode, where a task is executed once.
"""

import multiprocessing
import re
import sys
import tempfile
import time
from collections import Counter, defaultdict
from decimal import Decimal
from pathlib import Path

from idemguard import ExecutionLedger, Guard, configure, idempotent, record_usage, worker
from idemguard.demo import TEXTS

PRICES = {"demo-large": {"input": "3", "output": "15"}}  # invented; dollars per million tokens
QUESTIONS = ("title", "date", "author", "language", "tone", "topic", "place", "length", "reader")


def ask_model(text: str, answer: str, seconds: float) -> str:
    """Stands in for a model: takes its time, and reports the tokens, one per six letters."""
    time.sleep(seconds)
    spent = [len(re.findall(r"\w{1,6}|[^\w\s]", part)) for part in (text, answer)]
    record_usage(input_tokens=spent[0], output_tokens=spent[1], model="demo-large")
    return answer


@idempotent(task_type="summarise")
def summarise(path: str) -> str:
    text = Path(path).read_text(encoding="utf-8")
    counts = Counter(re.findall(r"\w{4,}", text))
    sentences = re.split(r"(?<=[.!?])\s+", text)
    sentences.sort(key=lambda one: -sum(counts[word] for word in re.findall(r"\w{4,}", one)))
    return ask_model(text, " ".join(sentences[:5]), 0.05)


@idempotent(task_type="extract_facts")
def extract_facts(path: str) -> str:
    text = Path(path).read_text(encoding="utf-8")
    words = text.split()
    places = [place for place, word in enumerate(words) if re.search(r"\d", word)]
    facts = [" ".join(words[max(0, place - 2) : place + 4]) for place in places]
    return ask_model(text, "\n".join(facts), 0.05)


@idempotent(task_type="look_up")
def look_up(path: str, question: str) -> str:
    start = Path(path).read_text(encoding="utf-8")[:80]
    return ask_model(f"{question}? {start}", start[:20], 0.005)


def work(number: int, files: list[str], settings: dict, barrier) -> None:  # noqa: ANN001 - made at run time
    """Every third document is this worker's; the costly part of the next one it does as well."""
    configure(**settings, pricer=PRICES)
    barrier.wait(timeout=30)
    with worker(f"worker-{number}"):
        for place, file in enumerate(files):
            if (place - number) % 3 < 2:  # noqa: PLR2004 - its own, and its neighbour's
                summarise(file)
                extract_facts(file)
            if place % 3 == number:
                for question in QUESTIONS:
                    look_up(file, question)


def report(mode: str, ledger: ExecutionLedger) -> None:
    costs, tokens = defaultdict(list), 0
    for line in ledger.lines():
        costs[line.fingerprint].append(line.cost or Decimal(0))
        tokens += (line.usage and line.usage.total_tokens) or 0
    executions = sum(map(len, costs.values()))
    doubled = sum(len(of_task) > 1 for of_task in costs.values()) / len(costs)
    bill, ideal = sum(map(sum, costs.values())), sum(map(max, costs.values()))
    calls = executions + ledger.totals()["reused"]
    print(f"{mode}{calls:7}{executions:12}{doubled:9.1%}{tokens:9,}{bill:10.4f}{bill / ideal:6.2f}")


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else TEXTS
    files = [str(path) for path in sorted(folder.glob("*.txt")) if is_text(path)][:30]
    if not files:
        sys.exit(f"double_bill: no .txt files with text in {folder}")
    print("         calls  executions  doubled   tokens    bill $     x")
    with tempfile.TemporaryDirectory() as there:
        store = f"sqlite:///{there}/ledger.db"
        for mode in ("observe", "enforce"):
            settings = {"store": store, "namespace": mode, "mode": mode}
            barrier = multiprocessing.Barrier(3)
            workers = [
                multiprocessing.Process(target=work, args=(number, files, settings, barrier))
                for number in range(3)
            ]
            for process in workers:
                process.start()
            for process in workers:
                process.join()
            guard = Guard(store=store, namespace=mode)
            report(mode, guard.ledger)
            guard.close()


def is_text(path: Path) -> bool:
    try:
        small = path.is_file() and path.stat().st_size < 200_000  # noqa: PLR2004 - bytes
        return small and bool(str(path).encode() and path.read_text(encoding="utf-8").strip())
    except (OSError, UnicodeError):
        return False


if __name__ == "__main__":
    main()
