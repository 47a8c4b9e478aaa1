"""What type checkers say about programs that use Holdfast: mypy and pyright, both strict."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast import Holdfast
from holdfast.errors import DefinitionError, InvalidInput

ROOT = Path(__file__).parents[2]
MISTAKES = "tests/typing/mistakes.py"

Errors = dict[str, dict[int, str]]


def _run(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.stdout


def mypy(*files: str) -> Errors:
    """The errors of mypy, by file and line."""
    found: Errors = {file: {} for file in files}
    for file, line, text in re.findall(
        r"^(\S+):(\d+): error: (.*)", _run("mypy", *files), re.MULTILINE
    ):
        found[file][int(line)] = text
    return found


def pyright() -> Errors:
    """The errors of pyright in what `pyproject.toml` names, by file and line."""
    answer = json.loads(_run("pyright", "--outputjson", "--pythonpath", sys.executable))
    assert answer["summary"]["filesAnalyzed"] > 1
    found: Errors = {}
    for one in answer["generalDiagnostics"]:
        file = str(Path(one["file"]).relative_to(ROOT))
        found.setdefault(file, {})[one["range"]["start"]["line"] + 1] = one["message"]
    return found


def _caught() -> set[int]:
    lines = (ROOT / MISTAKES).read_text().splitlines()
    return {number for number, line in enumerate(lines, 1) if line.endswith("# caught")}


def test_mypy_catches_every_mistake() -> None:
    """Wrong types, missing and misspelt arguments, options that do not exist; nothing else."""
    assert set(mypy(MISTAKES)[MISTAKES]) == _caught()


def test_pyright_catches_every_mistake_and_nothing_else() -> None:
    """The same; and it has nothing against the correct programs beside them, which mypy checks in
    every build."""
    found = pyright()
    assert set(found.pop(MISTAKES)) == _caught()
    assert found == {}


def test_a_misspelt_option_names_the_nearest_one_and_the_line() -> None:
    """Of the user's file, for the decorator and for the options of a send."""
    app: Any = Holdfast("shop")
    here = rf"{re.escape(__file__)}:\d+: "
    with pytest.raises(DefinitionError, match=here + r".*'tmeout': did you mean 'timeout'\?"):
        app.job(tmeout="5m")
    with pytest.raises(DefinitionError, match=here + r".*'catchup': did you mean 'catch_up'\?"):
        app.cron("@daily", catchup="last")
    job = app.job(name="job")(lambda: None)
    with pytest.raises(InvalidInput, match=here + r".*'kye': did you mean 'key'\?"):
        job.options(kye="42")
    with pytest.raises(InvalidInput, match=here + r".*'zzz': it has at, "):
        job.schedule("s", cron="@daily", zzz=1)
