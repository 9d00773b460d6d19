"""The examples that docs/ci.md shows: tasks of a Celery worker, and the workflow file."""

from __future__ import annotations

import shutil
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples" / "ci"


def test_celery_tasks_of_a_worker_that_a_session_fixture_started(project, redis_url):
    for file in (EXAMPLES / "celery").glob("*.py"):
        shutil.copy(file, project.folder)
    project.environment["DEMO_BROKER"] = redis_url
    result = project.run()
    result.came_to(passed=2, failed=1)
    result.has(
        "idemguard: translate * ran 2 times in this test, 1 allowed",
        "     called from app.py:* in careless",
        "FAILED test_celery.py::test_runs_twice *",
    )


def test_the_workflow_names_options_that_there_are(project):
    text = (EXAMPLES / "idemguard.yml").read_text()
    options = [word for word in text.split() if word.startswith("--idemguard")]
    assert options
    project.run("def test_a(): pass\n", *options).came_to(passed=1)
