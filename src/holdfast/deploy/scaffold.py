"""Creates projects and jobs from the templates beside this module.

A template's path is the file's path: a trailing `.jinja` is dropped, and a leading `dot-` becomes a
dot. Existing files are never overwritten: if one is in the way, nothing is written.

A project needs a Holdfast that can be installed. By default that is a wheel of the one that makes
it, kept in the project's `wheels/`.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

from holdfast.config.deployment import check_label
from holdfast.deploy.project import JOBS, SETTINGS, check_job
from holdfast.deploy.render import environment
from holdfast.deploy.wheel import WHEEL, own_wheel
from holdfast.errors import ConfigError
from holdfast.version import DISTRIBUTION, __version__

SUFFIX = ".jinja"
SAMPLES = ("image-download", "image-resize")
WHEELS = "wheels"
INDEX = f"{DISTRIBUTION}>={__version__}"


def new_project(name: str, root: Path, source: str = "wheel") -> list[Path]:
    """Create a project with its two sample jobs; returns the files."""
    check_label(name, "project")
    requirement, wheels = _holdfast(source)
    wanted: dict[Path, bytes] = {root / WHEELS / file: data for file, data in wheels.items()}
    wanted |= _rendered("project", root, name, requirement)
    for sample in SAMPLES:
        for template in ("job", sample):
            wanted |= _rendered(template, root / JOBS / sample, sample, requirement)
    return _write(wanted)


def new_job(name: str, root: Path) -> list[Path]:
    """Add a job to the project in a directory; it gets Holdfast as the other jobs do."""
    check_job(name)
    if not (root / JOBS).is_dir():
        raise ConfigError(
            f"{root.resolve()} has no directory {JOBS!r}: run this in a project, or make one with "
            "'holdfast new project NAME'"
        )
    if (root / JOBS / name).exists():
        raise ConfigError(f"{root / JOBS / name} exists already: choose another name")
    requirement = next(_required(root), INDEX)
    return _write(dict(_rendered("job", root / JOBS / name, name, requirement)))


def _holdfast(source: str) -> tuple[str, dict[str, bytes]]:
    """What jobs require to get Holdfast from a source, and the wheels that the project keeps."""
    if source == "index":
        return INDEX, {}
    if source.startswith("git+"):
        return f"{DISTRIBUTION} @ {source}", {}
    if source == "wheel":
        return f"{DISTRIBUTION}=={__version__}", {WHEEL: own_wheel()}
    path = Path(source)
    named = re.fullmatch(rf"{DISTRIBUTION.replace('-', '_')}-([^-]+)-py3-none-any\.whl", path.name)
    if named and path.is_file():
        return f"{DISTRIBUTION}=={named[1]}", {path.name: path.read_bytes()}
    raise ConfigError(
        f"{source!r} is no source of Holdfast: say 'wheel', 'index', the path of a wheel such as "
        f"{WHEEL}, or a git reference such as git+https://HOST/OWNER/holdfast@v{__version__}"
    )


def _required(root: Path) -> Iterator[str]:
    """What the jobs of a project require to get Holdfast."""
    for path in sorted((root / JOBS).glob(f"*/{SETTINGS}")):
        found = tomllib.loads(path.read_text(encoding="utf-8")).get("project", {})
        for one in found.get("dependencies", ()):
            if one.startswith(DISTRIBUTION):
                yield re.sub(r"\[.*?\]", "", one, count=1)  # each job names its own extras


def _rendered(
    template: str, target: Path, name: str, requirement: str
) -> Iterator[tuple[Path, bytes]]:
    """Each file of a template with its text."""
    engine = environment()
    values = {
        "name": name,
        "module": name.replace("-", "_"),
        "requirement": requirement,
        "wheel": "==" in requirement,
    }
    for source in engine.list_templates():
        if source.startswith(f"{template}/") and source.endswith(SUFFIX):
            path = source.removeprefix(f"{template}/").removesuffix(SUFFIX)
            path = re.sub(r"(^|/)dot-", r"\1.", path)
            yield target / path, engine.get_template(source).render(values).encode()


def _write(wanted: dict[Path, bytes]) -> list[Path]:
    existing = [str(path) for path in wanted if path.exists()]
    if existing:
        more = f" and {len(existing) - 3} more" if len(existing) > 3 else ""
        raise ConfigError(
            f"already there: {', '.join(existing[:3])}{more}; nothing was written: choose another "
            "name or directory"
        )
    for path, data in wanted.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        if path.suffix == ".sh":
            path.chmod(0o755)
    return sorted(wanted)
