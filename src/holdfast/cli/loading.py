"""Loading the user's app: `module:object`, as with uvicorn; without `:object` it is called `app`.

The working directory is searched first. A wrong name is reported in one sentence; an error inside
the user's module is shown with its traceback, from the first line of the user's code.
"""

from __future__ import annotations

import importlib
import json
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from holdfast.cli import out
from holdfast.errors import ConfigError, HoldfastError
from holdfast.projects import set_up_django

if TYPE_CHECKING:
    from holdfast.app import Holdfast
    from holdfast.payload import Signature

T = TypeVar("T")

DEFAULT_ATTRIBUTE = "app"


class AppNotLoaded(ConfigError):
    """There is no app with that name, or its module cannot be imported."""


def load_app(target: str) -> Holdfast:
    """The app that `target` names."""
    from holdfast.app import Holdfast

    return load_object(target, Holdfast, DEFAULT_ATTRIBUTE, "a Holdfast app", "Holdfast(…)")


def load_object(target: str, kind: type[T], default: str, what: str, made_by: str) -> T:
    """The object that `target` names; `default` is used when it names only a module."""
    name, _, attribute = target.partition(":")
    _check(target, name, default)
    module = _import(name)
    found: Any = module
    for part in (attribute or default).split("."):
        if not hasattr(found, part):
            raise AppNotLoaded(_no_attribute(module, attribute, target, kind, default, what))
        found = getattr(found, part)
    if not isinstance(found, kind):
        raise AppNotLoaded(
            f"{target} is a {type(found).__name__}, not {what}: "
            f"name the object that `{made_by}` returned"
        )
    return found


def describe(app: Holdfast) -> dict[str, Any]:
    """What another process needs to know about an app without importing it."""
    jobs = [
        {
            "name": job.name,
            "group": job.spec.group,
            "parameters": list(job.signature.parameters),
            "sample": _sample(job.signature),
            "on": list(job.spec.on),
            "timeout": job.spec.timeout_seconds,
            "ordered": job.spec.ordered,
        }
        for job in app.jobs.values()
    ]
    return {"name": app.name, "jobs": jobs, "schedules": sorted(app.schedules)}


def _sample(signature: Signature) -> str:
    """A payload that the job takes, to try it with; empty if it needs none."""
    import msgspec

    from holdfast.payload.published import published, read_label, sample

    known = read_label(published(signature))
    found = sample(known, "abc") if known else msgspec.UNSET
    return "" if found is msgspec.UNSET else json.dumps(found)


def _check(target: str, name: str, default: str) -> None:
    if name.endswith(".py") or "/" in name:
        module = name.removesuffix(".py").removeprefix("./").replace("/", ".")
        raise AppNotLoaded(f"{target!r} is a file: name the module, {module}:{default}")
    if not name or not all(part.isidentifier() for part in name.split(".")):
        raise AppNotLoaded(f"{target!r} is not of the form module:object, such as shop:{default}")


def _import(name: str) -> ModuleType:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        set_up_django()
        return importlib.import_module(name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - whatever the user's module raises, also SystemExit
        if isinstance(error, ModuleNotFoundError) and _is_part_of(error.name, name):
            raise AppNotLoaded(
                f"there is no module {error.name!r} in {here} or among the installed packages"
            ) from None
        if isinstance(error, HoldfastError):
            raise AppNotLoaded(_placed(error)) from None
        out.note("".join(traceback.format_exception(_from_user_code(error))).rstrip(), lines=True)
        raise AppNotLoaded(
            f"module {name!r} cannot be imported: {type(error).__name__}, see above"
        ) from None


def _is_part_of(missing: str | None, name: str) -> bool:
    return missing is not None and (name == missing or name.startswith(f"{missing}."))


def _placed(error: BaseException) -> str:
    """One of our errors, with the line of user code at which it was raised."""
    ours = str(Path(__file__).parents[1])
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [
        f for f in frames if not f.filename.startswith(ours) and "importlib" not in f.filename
    ]
    if theirs and str(error).startswith(f"{theirs[-1].filename}:"):
        return str(error)  # its text has the line already
    place = f"{theirs[-1].filename}, line {theirs[-1].lineno}" if theirs else "app"
    return f"{place}: {error}"


def _from_user_code(error: BaseException) -> BaseException:
    """The error with its traceback cut to the frames after ours and importlib's."""
    found = error.__traceback__
    while found is not None and _is_machinery(found.tb_frame.f_code.co_filename):
        found = found.tb_next
    return error.with_traceback(found)


def _is_machinery(filename: str) -> bool:
    return filename == __file__ or "importlib" in filename


def _no_attribute(
    module: ModuleType, attribute: str, target: str, kind: type, default: str, what: str
) -> str:
    there = [
        f"{module.__name__}:{n}" for n, value in vars(module).items() if isinstance(value, kind)
    ]
    hint = f"did you mean {' or '.join(there)}?" if there else f"it does not have {what} at all"
    if not attribute:
        return f"{target!r} names no object and the module has no '{default}': {hint}"
    return f"module {module.__name__!r} has no {attribute!r}: {hint}"


def main() -> None:
    """`python -m holdfast.cli.loading APP FILE`: write the app's description to a file."""
    target, output = sys.argv[1:]
    try:
        app = load_app(target)
    except ConfigError as error:
        sys.exit(f"error: {error}")
    Path(output).write_text(json.dumps(describe(app)), encoding="utf-8")


if __name__ == "__main__":
    main()
