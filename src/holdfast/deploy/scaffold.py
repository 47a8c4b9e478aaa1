"""New projects and new jobs, from the templates beside this module.

A template's path is the file's path: `.jinja` at its end is dropped, and `dot-` at the beginning of
a name is a dot. Existing files are never overwritten: whatever is in the way is an error, before
anything is written.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path, PurePosixPath

from jinja2 import Environment, StrictUndefined

from holdfast.config.deployment import check_label
from holdfast.deploy.project import JOBS, check_job
from holdfast.errors import ConfigError
from holdfast.version import __version__

SUFFIX = ".jinja"
SAMPLES = ("image-download", "image-resize")


def new_project(name: str, root: Path) -> list[Path]:
    """Make a project with its two sample jobs; returns what was written."""
    check_label(name, "project")
    wanted = dict(_rendered("project", root, name=name))
    for sample in SAMPLES:
        common = dict(_rendered("job", root / JOBS / sample, name=sample))
        wanted |= common | dict(_rendered(sample, root / JOBS / sample, name=sample))
    return _write(wanted)


def new_job(name: str, root: Path) -> list[Path]:
    """Add a job to the project in a directory."""
    check_job(name)
    if not (root / JOBS).is_dir():
        raise ConfigError(
            f"{root.resolve()} has no directory {JOBS!r}: run this in a project, or make one with "
            "'holdfast new project NAME'"
        )
    if (root / JOBS / name).exists():
        raise ConfigError(f"{root / JOBS / name} is there already: choose another name")
    return _write(dict(_rendered("job", root / JOBS / name, name=name)))


def _rendered(template: str, target: Path, *, name: str) -> Iterator[tuple[Path, str]]:
    """Each file of a template with its text."""
    environment = Environment(
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        variable_start_string="[[",  # GitHub's workflows and Grafana have the usual braces
        variable_end_string="]]",
        block_start_string="[%",
        block_end_string="%]",
        comment_start_string="[#",
        comment_end_string="#]",
        autoescape=False,
    )
    values = {"name": name, "module": name.replace("-", "_"), "version": __version__}
    for path, file in _walk(files("holdfast.deploy") / "templates" / template, PurePosixPath()):
        text = environment.from_string(file.read_text(encoding="utf-8")).render(values)
        yield target / path, text


def _walk(folder: Traversable, below: PurePosixPath) -> Iterator[tuple[PurePosixPath, Traversable]]:
    for entry in sorted(folder.iterdir(), key=lambda one: one.name):
        name = entry.name.removesuffix(SUFFIX)
        name = "." + name.removeprefix("dot-") if name.startswith("dot-") else name
        if entry.is_dir():
            yield from _walk(entry, below / name)
        elif entry.name.endswith(SUFFIX):
            yield below / name, entry


def _write(wanted: dict[Path, str]) -> list[Path]:
    there = [str(path) for path in wanted if path.exists()]
    if there:
        more = f" and {len(there) - 3} more" if len(there) > 3 else ""
        raise ConfigError(
            f"there already: {', '.join(there[:3])}{more}; nothing was written: choose another name"
            " or directory"
        )
    for path, text in wanted.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        if path.suffix == ".sh":
            path.chmod(0o755)
    return sorted(wanted)
