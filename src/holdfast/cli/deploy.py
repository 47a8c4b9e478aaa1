"""`holdfast deploy`: manifests for Kubernetes, their check, and the registration before workers."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from holdfast.cli.common import Cli, connected, emit, given, note, say
from holdfast.cli.roles import AppArgument, LogFormat, LogLevel, start_logging

OUT = Path("deploy") / "rendered"
STORE = Path(".holdfast") / "local"
Folder = Annotated[
    Path, typer.Option("--out", metavar="DIR", help="Where the manifests are.", file_okay=False)
]
Environment = Annotated[
    str,
    typer.Option(
        "--environment",
        metavar="NAME",
        help="An environment: a directory in deploy/overlays, with its own holdfast.toml if any.",
    ),
]
Release = Annotated[
    str | None, typer.Option("--release", metavar="N", help="The release: 41, 1.10.2.")
]


def register(app: Cli) -> None:
    """Add `holdfast deploy`."""
    noun = app.noun("deploy", "Put a project on Kubernetes.")
    noun.command("render")(render)
    noun.command("check")(check)
    noun.command("register")(register_app)
    noun.command("unregister")(unregister_jobs)
    noun.command("local")(local)


def render(
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="DIR",
            help="Where the manifests go; without: deploy/rendered/ENVIRONMENT.",
            file_okay=False,
        ),
    ] = None,
    project: Annotated[
        Path, typer.Option("--project", metavar="DIR", help="The project.", file_okay=False)
    ] = Path(),
    tag: Annotated[
        list[str] | None,
        typer.Option(
            "--tag",
            metavar="[NAME=]TAG",
            help="Tag of all images, or of one job's (or 'control'); sha256:… is a digest.",
        ),
    ] = None,
    environment: Environment = "",
    release: Release = None,
    job: Annotated[
        str, typer.Option("--job", metavar="NAME", help="Only this job; leave the rest alone.")
    ] = "",
) -> None:
    """Write the manifests of a project: plain YAML, with the scripts that apply them in order.

    What they say comes from [deploy] in holdfast.toml, and from the directories in jobs/.
    """
    from holdfast.deploy.project import load_project
    from holdfast.deploy.render import render as write

    single = dict(word.split("=", 1) for word in tag or [] if "=" in word)
    common = next((word for word in reversed(tag or []) if "=" not in word), None)
    found = load_project(
        project,
        only=job,
        environment=environment,
        tags=single,
        tag=common,
        release=release,
        nats_url=given().nats_url,
    )
    out = out or OUT / environment
    written = write(found, out, only=bool(job))
    if given().json:
        emit([str(path) for path in written])
        return
    say(f"{len(written)} files in {out}, for {len(found.jobs)} jobs")
    note(f"next: holdfast deploy check --out {out}, then {out}/apply.sh")


def check(out: Folder = OUT, environment: Environment = "") -> None:
    """Say what is wrong with rendered manifests. Exits with 1 when something is.

    With --environment, what kustomize makes of its overlay is checked, as it is applied (needs
    kubectl).
    """
    from holdfast.deploy.check import check as look
    from holdfast.deploy.check import check_overlay as look_through
    from holdfast.deploy.check import schemas
    from holdfast.deploy.inventory import Inventory

    if environment:
        problems = look_through(Path("deploy") / "overlays" / environment, parse_command)
    else:
        problems = look(out, parse_command)
    if schemas(Inventory([])) is None:
        note("schemas are not checked: pip install kubernetes-validate")
    if given().json:
        emit([{"where": problem.where, "problem": problem.text} for problem in problems])
    elif problems:
        for problem in problems:
            say(str(problem))
    else:
        say(f"nothing is wrong with the manifests in {out}")
    if problems:
        raise typer.Exit(1)


@functools.cache
def _command_line() -> Any:
    from holdfast.cli import build

    return typer.main.get_command(build())


def parse_command(words: Sequence[str]) -> str:
    """What is wrong with the words after `holdfast`; empty when they are a command."""
    command, parent, name, rest = _command_line(), None, "holdfast", list(words)
    try:
        while True:
            context = command.make_context(name, rest, parent=parent)
            if not hasattr(command, "commands"):
                return ""
            left = [*getattr(context, "_protected_args", ()), *context.args]
            if not left and command.invoke_without_command:
                return ""
            name, command, rest = command.resolve_command(context, left)
            parent = context
    except Exception as error:  # noqa: BLE001 - typer's own errors are not public
        return str(getattr(error, "message", None) or str(error) or type(error).__name__)


async def register_app(app: AppArgument, release: Release = None) -> None:
    """Make an app's consumers and register its schedules, before any worker runs.

    An autoscaler cannot count what waits for a job whose consumer does not exist yet.
    """
    from holdfast.cli.loading import load_app
    from holdfast.config import SchedulerConfig, WorkerConfig, load
    from holdfast.deploy.register import register as make

    loaded = load_app(app)
    config = load(SchedulerConfig, release=release)
    async with connected(create=True) as client:
        done = await make(client, loaded, load(WorkerConfig), release=config.release)
    if given().json:
        emit(done)
        return
    say(f"{len(done.consumers)} consumers: {', '.join(done.consumers)}")
    if done.newer:
        note(f"the schedules of release {done.newer} stay: this release is lower")
    elif done.schedules:
        say(f"{len(done.schedules)} schedules: {', '.join(done.schedules)}")


async def unregister_jobs(
    app: Annotated[str, typer.Argument(metavar="APP", help="Name of the app.")],
    group: Annotated[str, typer.Argument(metavar="GROUP", help="Group of the jobs.")],
    jobs: Annotated[list[str], typer.Argument(metavar="JOB...", help="Jobs to remove.")],
    discard: Annotated[
        bool, typer.Option("--discard", help="Also while runs wait: they stay without a worker.")
    ] = False,
) -> None:
    """Remove the consumers of jobs that were deleted; refuses while runs wait for one of them."""
    from holdfast.deploy.register import unregister

    async with connected() as client:
        removed = await unregister(client, group, jobs, discard=discard)
    if given().json:
        emit(removed)
        return
    say(f"{app}: {len(removed)} consumers removed: {', '.join(removed) or 'there were none'}")


def local(
    port: Annotated[
        int | None, typer.Option(help="Port of the server; without: 4222.", min=1, max=65_535)
    ] = None,
    store: Annotated[
        Path, typer.Option(help="Directory that keeps the data.", metavar="DIR", file_okay=False)
    ] = STORE,
    log_level: LogLevel = None,
    log_format: LogFormat = None,
) -> None:
    """Run the project in this directory on this machine: server, control plane, every worker.

    Accepted runs survive a restart: the data stays in --store. Ctrl-C stops everything.
    """
    import tempfile

    from holdfast.cli.server import PORT, flush, monitor_port_of
    from holdfast.deploy.local import register_all, run
    from holdfast.deploy.project import load_project
    from holdfast.process import run_loop
    from holdfast.server import Server

    start_logging(log_level, log_format)
    project = load_project(Path())
    wanted = port or PORT
    server = Server(wanted, store.resolve(), fast=True, monitor_port=monitor_port_of(wanted, 1))
    with server, tempfile.TemporaryDirectory(prefix="holdfast-") as folder:
        register_all(project, server.url)
        say(f"{len(project.jobs)} jobs run on {server.url}, data in {store}. Ctrl-C stops them.")
        flush()
        code = run_loop(run(project, server.url, Path(folder)))
    raise typer.Exit(code)
