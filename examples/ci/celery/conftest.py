"""One worker process for all tests."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def worker() -> Iterator[None]:
    quiet = ("--without-gossip", "--without-mingle", "--without-heartbeat", "-l", "ERROR")
    process = subprocess.Popen(  # noqa: S603 - our own program
        [sys.executable, "-m", "celery", "-A", "app", "worker", "-P", "solo", *quiet],
        cwd=HERE,
        env=os.environ | {"PYTHONPATH": f"{HERE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
    )
    yield
    process.terminate()
    process.wait(20)
