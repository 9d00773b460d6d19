"""What the pytest plugin costs a suite, as ratios of runs in turns: trivial tests, and tests with one guarded call.

`python benchmarks/plugin.py [--tests N] [--pairs N]`
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

GUARDED = "def test_{0}(): assert task({0}) == {0}"
TASKS = """
from idemguard import Guard
guard = Guard(store="memory://")
@guard.idempotent(task_type="t")
def task(n): return n
"""
IMPORT = """
import time
import pytest
started = time.process_time()
import pytest_idemguard.plugin
print(time.process_time() - started)
"""


def compiled(folder: Path) -> dict[str, str]:
    """An environment in which everything is compiled once, as what is installed is."""
    return os.environ | {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(folder / "pyc")}


def cpu(folder: Path, *options: str) -> float:
    """Seconds of CPU that one run of a suite takes."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        *options,
        str(folder),
    ]
    # nothing but the plugin: others' entry points are not what is measured
    environment = compiled(folder.parent) | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def ratio(folder: Path, pairs: int) -> str:
    """How many times the CPU a run takes with the plugin, in pairs taken in turns."""
    ratios = []
    for number in range(pairs + 1):
        first = number % 2
        took = {}
        for plugin in (first, 1 - first):
            took[plugin] = cpu(folder, *(["-p", "pytest_idemguard.plugin"] if plugin else []))
        if number:  # the first writes what is compiled
            ratios.append(took[1] / took[0])
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.3f} (quartiles {low:.3f} to {high:.3f}, {pairs} pairs)"


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tests", type=int, default=2000)
    parser.add_argument("--pairs", type=int, default=10)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        for name, head, line in (
            ("trivial tests", "", "def test_{0}(): pass"),
            ("one guarded call each", TASKS, GUARDED),
        ):
            folder = Path(made) / name.replace(" ", "_")
            folder.mkdir()
            (folder / "pytest.ini").write_text("[pytest]\n")
            lines = [head, *(line.format(n) for n in range(given.tests))]
            (folder / "test_it.py").write_text("\n".join(lines) + "\n")
            print(f"{given.tests} {name}: {ratio(folder, given.pairs)}")
        command = [sys.executable, "-c", IMPORT]
        imports = [
            float(
                subprocess.run(
                    command, env=compiled(Path(made)), capture_output=True, check=True
                ).stdout
            )
            for _ in range(2 * given.pairs)
        ]
    print(f"import of the entry module: {1000 * min(imports):.2f} ms of CPU")


if __name__ == "__main__":
    main()
