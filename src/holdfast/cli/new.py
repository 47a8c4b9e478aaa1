"""`holdfast new`: a project, or one more job in it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.common import Cli, emit, given, note, say


def register(app: Cli) -> None:
    """Add `holdfast new`."""
    noun = app.noun("new", "Start a project, or add a job to it.")
    noun.command("project")(project)
    noun.command("job")(job)


def project(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The project, and its directory.")],
    path: Annotated[
        Path | None, typer.Option("--path", metavar="DIR", help="Another directory.")
    ] = None,
) -> None:
    """Make a project: two sample jobs, shared code, tests, a pipeline, a deployment."""
    from holdfast.deploy.scaffold import new_project

    root = path or Path(name)
    written = new_project(name, root)
    _tell(written)
    note(f"next: cd {root}, and read README.md")


def job(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The job, and its directory.")],
    path: Annotated[
        Path, typer.Option("--project", metavar="DIR", help="The project.", file_okay=False)
    ] = Path(),
) -> None:
    """Add a job to a project: jobs/NAME with its code, tests, requirements and image.

    Nothing else has to be edited: tests, images, manifests, consumers and dashboards follow from
    the directory.
    """
    from holdfast.deploy.scaffold import new_job

    written = new_job(name, path)
    _tell(written)
    note(f"next: make test-{name}")


def _tell(written: list[Path]) -> None:
    if given().json:
        emit([str(path) for path in written])
        return
    for path in written:
        say(str(path))
