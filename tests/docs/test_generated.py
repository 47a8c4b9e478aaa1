"""Everything that has a name is documented: commands, options, metrics, errors, exports, words."""

from __future__ import annotations

import importlib.util
import inspect
import re
import tomllib
from types import ModuleType
from typing import Any

import pytest
import typer

import holdfast
import holdfast.testing
from holdfast import errors
from holdfast.cli import build
from holdfast.durations import text
from holdfast.model.liveness import PROFILES
from holdfast.telemetry import CATALOGUE, Telemetry
from tests.docs.pages import GENERATED, ROOT

DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    """`tools/generate_docs.py`."""
    path = ROOT / "tools" / "generate_docs.py"
    spec = importlib.util.spec_from_file_location("generate_docs", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", GENERATED)
def test_generated_page_is_current(generator: ModuleType, name: str) -> None:
    """The page is what the code says; `make docs` writes it anew."""
    assert set(generator.pages()) == set(GENERATED)
    assert (DOCS / name).read_text(encoding="utf-8") == generator.pages()[name](), "run: make docs"


def test_cli_page_has_every_command_and_option(generator: ModuleType) -> None:
    """Each command has its own heading, and each option of it a line with a meaning."""
    page = (DOCS / "cli.md").read_text(encoding="utf-8")
    root: Any = typer.main.get_command(build())
    for path, command in generator.commands(root):
        heading = re.escape(f"holdfast {' '.join(path)}")
        section = re.search(rf"^#+ {heading}\n(.*?)(?=^#|\Z)", page, re.MULTILINE | re.DOTALL)
        assert section, f"{path} is not in docs/cli.md"
        assert command.help, f"{path} does not say what it does"
        for option in generator.options_of(command):
            assert option.help, f"{path} {option.opts} does not say what it means"
            assert all(flag in section[1] for flag in option.opts), f"{path} {option.opts}"


def test_metrics_page_has_every_metric(generator: ModuleType) -> None:
    """Each metric is there under the name that Prometheus sees."""
    page = (DOCS / "metrics.md").read_text(encoding="utf-8")
    telemetry = Telemetry()
    served = telemetry.render().decode()
    for metric in CATALOGUE:
        name = generator.exposed(metric)
        assert f"| `{name}` |" in page
        assert metric.name in served


def test_every_error_is_in_the_tree_of_its_module() -> None:
    """The tree at the top of `holdfast.errors` has every class, below the one it derives from."""
    classes = {
        name: found
        for name, found in vars(errors).items()
        if inspect.isclass(found) and issubclass(found, Exception)
    }
    lines = re.findall(r"^    ((?:[│├└─ ]{4})*)([A-Z]\w+)", errors.__doc__ or "", re.MULTILINE)
    drawn: dict[str, str] = {}
    above: list[str] = []
    for indent, name in lines:
        depth = len(indent) // 4
        above[depth:] = [name]
        drawn[name] = above[depth - 1] if depth else ""
    assert drawn.keys() == classes.keys()
    for name, parent in drawn.items():
        assert not parent or issubclass(classes[name], classes[parent])


def test_liveness_page_has_the_numbers_of_every_profile() -> None:
    """The table of profiles says what the code does."""
    page = (DOCS / "liveness.md").read_text(encoding="utf-8")
    for name, numbers in PROFILES.items():
        wanted = [
            *(text(n) for n in (numbers.heartbeat_seconds, numbers.timeout_seconds)),
            *(text(n) for n in (numbers.initial_delay_seconds, numbers.ping_seconds)),
            *(text(numbers.confirm_seconds), str(numbers.ping_misses)),
            text(numbers.grace_seconds),
        ]
        row = re.search(rf"^\| `{name}`.*$", page, re.MULTILINE)
        assert row
        found = [cell.strip().replace(" ", "") for cell in row[0].split("|")[2:-1]]
        assert [cell.replace("min", "m") for cell in found] == wanted


EXPORTED = {
    "Backoff",
    "Bucket",
    "Conflict",
    "Context",
    "Discard",
    "Flow",
    "FlowEvent",
    "FlowStep",
    "Holdfast",
    "HoldfastError",
    "Job",
    "Retry",
    "Run",
    "RunStatus",
    "Limit",
    "LogLine",
    "Once",
    "Resource",
    "Schedules",
    "Settled",
    "Snooze",
    "StepFailed",
    "SyncApp",
    "SyncContext",
    "Worker",
    "__version__",
    "current_step",
    "run_consumer",
}
EXPORTED_FOR_TESTS = {
    "DeadLetter",
    "FakeClock",
    "FakeContext",
    "FakeSyncContext",
    "Memory",
    "PublishedEvent",
    "RunningWorker",
    "eager",
    "make_context",
    "make_sync_context",
    "memory",
    "replay_flow",
}


@pytest.mark.parametrize(
    ("module", "names"),
    [(holdfast, EXPORTED), (holdfast.testing, EXPORTED_FOR_TESTS)],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_exported_names_are_these(module: ModuleType, names: set[str]) -> None:
    """What a user may import changes only on purpose: here, in the docs and in the changelog."""
    assert set(module.__all__) == names
    told = "".join(path.read_text(encoding="utf-8") for path in DOCS.glob("*.md"))
    for name in names:
        assert getattr(module, name)
        assert name.startswith("_") or name in told, f"{name} is not documented"


def test_version_is_the_same_everywhere() -> None:
    """The package and the changelog speak of the same version; the metadata take it from there."""
    metadata = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "version" in metadata["project"]["dynamic"]
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## \[?([\d.]+)", changes, re.MULTILINE)[0] == holdfast.__version__
