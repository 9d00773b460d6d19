"""Which lines and branches of the rules the sequences do not reach: `python -m lua.cover count`."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

import coverage
from lua.sequences import generated

import idemguard

# what no command is performed by
ASIDE = {"waits", "rolled", "counted", "percentile", "executions", "duplicates", "total"}
FILES = [str(Path(idemguard.__file__).parent / name) for name in ("claim.py", "windows.py")]


def rules(path: str) -> set[int]:
    """The lines of the functions that commands are performed by."""
    lines: set[int] = set()
    for node in ast.walk(ast.parse(Path(path).read_text("utf-8"))):
        if not isinstance(node, ast.FunctionDef) or node.name in ASIDE or not node.args.args:
            continue
        if node.args.args[0].arg != "self" or node.name == "at":
            lines |= set(range(node.body[0].lineno, (node.end_lineno or 0) + 1))
    return lines


def main() -> None:
    """Prints them as JSON: a file's name, a line, and its text, or from which line to which."""
    watch = coverage.Coverage(data_file=None, branch=True, include=FILES, config_file=False)
    watch.exclude(r"assert_never\(")
    watch.start()
    for seed in range(int(sys.argv[1])):
        generated(seed, "q")
    watch.stop()
    missing: list[list[object]] = []
    reached = 0
    for path in FILES:
        lines, name = rules(path), Path(path).name
        text = [line.strip() for line in Path(path).read_text("utf-8").splitlines()]
        _, statements, _, unseen, _ = watch.analysis2(path)
        reached += len(lines & set(statements)) - len(lines & set(unseen))
        missing += [[name, line, text[line - 1]] for line in unseen if line in lines]
        arcs = watch._analyze(path).missing_branch_arcs()
        for line, ends in arcs.items():
            missing += [
                [name, line, f"{text[line - 1]} -> {text[end - 1] if end > 0 else 'end'}"]
                for end in ends
                if line in lines
            ]
    print(json.dumps({"missing": missing, "reached": reached}))


if __name__ == "__main__":
    main()
