"""`holdfast new`: a project, or one more job in it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from holdfast.cli import out
from holdfast.cli.command import command
from holdfast.cli.options import argument, option


@command("new project")
def project(
    name: Annotated[str, argument("The project, and its directory.", "NAME")],
    path: Annotated[Path | None, option("Another directory.", "DIR")] = None,
    source: Annotated[
        str,
        option(
            "Where the project gets Holdfast: 'wheel' (this one, kept in the project), "
            "'index', the path of a wheel, or a git reference (git+https://…@REF).",
            "SOURCE",
            "--install-from",
        ),
    ] = "wheel",
) -> None:
    """Make a project: two sample jobs, shared code, tests, a pipeline, a deployment."""
    from holdfast.deploy.scaffold import new_project

    root = path or Path(name)
    out.lines(new_project(name, root, source))
    out.note(f"next: cd {root}, and read README.md")


@command("new job")
def job(
    name: Annotated[str, argument("The job, and its directory.", "NAME")],
    path: Annotated[Path, option("The project.", "DIR", "--project", file_okay=False)] = Path(),
) -> None:
    """Add a job to a project: jobs/NAME with its code, tests, requirements and image.

    Nothing else has to be edited: tests, images, manifests, consumers and dashboards are derived
    from the directory.
    """
    from holdfast.deploy.scaffold import new_job

    out.lines(new_job(name, path))
    out.note(f"next: make test-{name}")
