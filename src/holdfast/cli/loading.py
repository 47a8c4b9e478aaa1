"""Loading the user's app: `module:object`, as with uvicorn; without `:object` it is called `app`.

The working directory is searched first. A wrong name is reported in one sentence; an error inside
the user's module is shown with its traceback, from the first line of the user's code.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from holdfast.cli.common import note
from holdfast.errors import ConfigError, HoldfastError

if TYPE_CHECKING:
    from holdfast.app import Holdfast

DEFAULT_ATTRIBUTE = "app"


class AppNotLoaded(ConfigError):
    """There is no app with that name, or its module cannot be imported."""


def load_app(target: str) -> Holdfast:
    """The app that `target` names."""
    from holdfast.app import Holdfast

    name, _, attribute = target.partition(":")
    _check(target, name)
    module = _import(name)
    found: Any = module
    for part in (attribute or DEFAULT_ATTRIBUTE).split("."):
        if not hasattr(found, part):
            raise AppNotLoaded(_no_attribute(module, attribute, target, Holdfast))
        found = getattr(found, part)
    if not isinstance(found, Holdfast):
        raise AppNotLoaded(
            f"{target} is a {type(found).__name__}, not a Holdfast app: "
            "name the object that `Holdfast(…)` returned"
        )
    return found


def describe(app: Holdfast) -> dict[str, Any]:
    """What another process needs to know about an app without importing it."""
    jobs = [
        {
            "name": job.name,
            "group": job.spec.group,
            "parameters": list(job.signature.parameters),
            "on": list(job.spec.on),
            "timeout": job.spec.timeout_seconds,
        }
        for job in app.jobs.values()
    ]
    return {"name": app.name, "jobs": jobs, "schedules": sorted(app.schedules)}


def _check(target: str, name: str) -> None:
    if name.endswith(".py") or "/" in name:
        module = name.removesuffix(".py").removeprefix("./").replace("/", ".")
        raise AppNotLoaded(f"{target!r} is a file: name the module, {module}:{DEFAULT_ATTRIBUTE}")
    if not name or not all(part.isidentifier() for part in name.split(".")):
        raise AppNotLoaded(
            f"{target!r} is not of the form module:object, such as shop:{DEFAULT_ATTRIBUTE}"
        )


def _import(name: str) -> ModuleType:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - whatever the user's module raises, also SystemExit
        if isinstance(error, ModuleNotFoundError) and _is_part_of(error.name, name):
            raise AppNotLoaded(
                f"there is no module {error.name!r} in {here} or among the installed packages"
            ) from None
        if isinstance(error, HoldfastError):
            raise AppNotLoaded(f"{_place(error)}: {error}") from None
        note("".join(traceback.format_exception(_from_user_code(error))).rstrip(), lines=True)
        raise AppNotLoaded(
            f"module {name!r} cannot be imported: {type(error).__name__}, see above"
        ) from None


def _is_part_of(missing: str | None, name: str) -> bool:
    return missing is not None and (name == missing or name.startswith(f"{missing}."))


def _place(error: BaseException) -> str:
    """The line of user code at which one of our errors was raised."""
    ours = str(Path(__file__).parents[1])
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [
        f for f in frames if not f.filename.startswith(ours) and "importlib" not in f.filename
    ]
    return f"{theirs[-1].filename}, line {theirs[-1].lineno}" if theirs else "app"


def _from_user_code(error: BaseException) -> BaseException:
    """The error with its traceback cut to the frames after ours and importlib's."""
    found = error.__traceback__
    while found is not None and _is_machinery(found.tb_frame.f_code.co_filename):
        found = found.tb_next
    return error.with_traceback(found)


def _is_machinery(filename: str) -> bool:
    return filename == __file__ or "importlib" in filename


def _no_attribute(module: ModuleType, attribute: str, target: str, kind: type) -> str:
    there = [
        f"{module.__name__}:{n}" for n, value in vars(module).items() if isinstance(value, kind)
    ]
    hint = f"did you mean {' or '.join(there)}?" if there else "it has no Holdfast app at all"
    if not attribute:
        return f"{target!r} names no object and the module has no '{DEFAULT_ATTRIBUTE}': {hint}"
    return f"module {module.__name__!r} has no {attribute!r}: {hint}"


def main() -> None:
    """`python -m holdfast.cli.loading APP FILE`: write the app's description to a file."""
    import json

    target, output = sys.argv[1:]
    try:
        app = load_app(target)
    except ConfigError as error:
        sys.exit(f"error: {error}")
    Path(output).write_text(json.dumps(describe(app)), encoding="utf-8")


if __name__ == "__main__":
    main()
