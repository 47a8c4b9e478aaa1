"""Creates projects and jobs from the templates beside this module.

A template's path is the file's path: a trailing `.jinja` is dropped, and a leading `dot-` becomes a
dot. Existing files are never overwritten: if one is in the way, nothing is written.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from holdfast.config.deployment import check_label
from holdfast.deploy.project import JOBS, check_job
from holdfast.deploy.render import environment
from holdfast.errors import ConfigError
from holdfast.version import __version__

SUFFIX = ".jinja"
SAMPLES = ("image-download", "image-resize")


def new_project(name: str, root: Path) -> list[Path]:
    """Create a project with its two sample jobs; returns the files."""
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
        raise ConfigError(f"{root / JOBS / name} exists already: choose another name")
    return _write(dict(_rendered("job", root / JOBS / name, name=name)))


def _rendered(template: str, target: Path, *, name: str) -> Iterator[tuple[Path, str]]:
    """Each file of a template with its text."""
    engine = environment()
    values = {"name": name, "module": name.replace("-", "_"), "version": __version__}
    for source in engine.list_templates():
        if source.startswith(f"{template}/") and source.endswith(SUFFIX):
            path = source.removeprefix(f"{template}/").removesuffix(SUFFIX)
            path = re.sub(r"(^|/)dot-", r"\1.", path)
            yield target / path, engine.get_template(source).render(values)


def _write(wanted: dict[Path, str]) -> list[Path]:
    existing = [str(path) for path in wanted if path.exists()]
    if existing:
        more = f" and {len(existing) - 3} more" if len(existing) > 3 else ""
        raise ConfigError(
            f"already there: {', '.join(existing[:3])}{more}; nothing was written: choose another "
            "name or directory"
        )
    for path, text in wanted.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        if path.suffix == ".sh":
            path.chmod(0o755)
    return sorted(wanted)
