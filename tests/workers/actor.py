"""A worker process: reads jobs from its standard input, does them one by one, answers each."""

from __future__ import annotations

import json
import os
import sys
import traceback
from typing import Any

from workers import jobs


def main() -> None:
    """Do jobs until the input ends."""
    answers = os.dup(1)  # whatever a body prints must not look like an answer
    os.dup2(2, 1)
    for line in sys.stdin:
        asked = json.loads(line)
        answer: dict[str, Any]
        try:
            answer = {"done": getattr(jobs, asked["job"])(**asked["given"])}
        except BaseException as error:  # noqa: BLE001 - told to who asked
            traceback.print_exc()
            answer = {"failed": repr(error)}
        os.write(answers, json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    main()
