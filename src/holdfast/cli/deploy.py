"""`holdfast deploy`: manifests for Kubernetes, their check, and the registration before workers."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from holdfast.cli import out
from holdfast.cli.command import command, connected
from holdfast.cli.options import (
    AppArgument,
    LogFormat,
    LogLevel,
    ReleaseOption,
    argument,
    given,
    option,
)
from holdfast.cli.processes import start_logging

OUT = Path("deploy") / "rendered"
STORE = Path(".holdfast") / "local"
Environment = Annotated[
    str,
    option(
        "An environment: a directory in deploy/overlays, with its own holdfast.toml if any.", "NAME"
    ),
]


@command("deploy render")
def render(
    into: Annotated[
        Path | None,
        option(
            "Directory to write to; default: deploy/rendered/ENVIRONMENT.",
            "DIR",
            "--out",
            file_okay=False,
        ),
    ] = None,
    project: Annotated[Path, option("The project.", "DIR", file_okay=False)] = Path(),
    tag: Annotated[
        list[str] | None,
        option(
            "Tag of all images, or of one job's (or 'control'); sha256:… is a digest.", "[NAME=]TAG"
        ),
    ] = None,
    environment: Environment = "",
    release: ReleaseOption = None,
    job: Annotated[str, option("Only this job; leave the rest alone.", "NAME")] = "",
) -> None:
    """Write the manifests of a project: plain YAML, with the scripts that apply them in order.

    Their content comes from [deploy] in holdfast.toml and from the directories in jobs/.
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
    into = into or OUT / environment
    written = [str(path) for path in write(found, into, only=bool(job))]
    if out.as_json(written):
        return
    out.say(f"{len(written)} files in {into}, for {len(found.jobs)} jobs")
    where = f"--environment {environment}" if environment else f"--out {into}"
    out.note(f"next: holdfast deploy check {where}, then {into}/apply.sh")


@command("deploy check")
def check(
    folder: Annotated[
        Path, option("Where the manifests are.", "DIR", "--out", file_okay=False)
    ] = OUT,
    environment: Environment = "",
) -> None:
    """Say what is wrong with rendered manifests. Exits with 1 when something is.

    With --environment, it checks the output of kustomize for the overlay, as it will be applied
    (needs kubectl).
    """
    from holdfast.deploy.check import check as look
    from holdfast.deploy.check import check_overlay as look_through
    from holdfast.deploy.check import schemas
    from holdfast.deploy.inventory import Inventory

    if environment:
        problems = look_through(Path("deploy") / "overlays" / environment, parse_command)
    else:
        problems = look(folder, parse_command)
    if schemas(Inventory([])) is None:
        out.note("schemas are not checked: pip install kubernetes-validate")
    what = f"what {environment} applies" if environment else f"the manifests in {folder}"
    if not out.as_json([{"where": one.where, "problem": one.text} for one in problems]):
        out.lines(problems or [f"nothing is wrong with {what}"])
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


@command("deploy register")
async def register_app(app: AppArgument, release: ReleaseOption = None) -> None:
    """Make an app's consumers and register its schedules, before any worker runs.

    Without a consumer, an autoscaler cannot count the runs that wait for a job.
    """
    from holdfast.cli.loading import load_app
    from holdfast.config import SchedulerConfig, WorkerConfig, load
    from holdfast.deploy.register import register as make

    loaded = load_app(app)
    config = load(SchedulerConfig, release=release)
    async with connected(create=True) as client:
        done = await make(client, loaded, load(WorkerConfig), release=config.release)
    if out.as_json(done):
        return
    out.say(f"{len(done.consumers)} consumers: {', '.join(done.consumers)}")
    if done.newer:
        out.note(f"the schedules of release {done.newer} stay: this release is lower")
    elif done.schedules:
        out.say(f"{len(done.schedules)} schedules: {', '.join(done.schedules)}")
    for group, job in done.left:
        out.note(
            f"{loaded.name} no longer has {group}/{job}: its runs wait for ever, unless another "
            f"app has the job; to remove it: holdfast deploy unregister {loaded.name} {group} "
            f"{job}"
        )


@command("deploy unregister")
async def unregister_jobs(
    app: Annotated[str, argument("Name of the app.", "APP")],
    group: Annotated[str, argument("Group of the jobs.", "GROUP")],
    jobs: Annotated[list[str], argument("Jobs to remove.", "JOB...")],
    discard: Annotated[
        bool, option("Remove it even if runs wait, which then stay without a worker.")
    ] = False,
    dry_run: Annotated[bool, option("Only say what would be removed.")] = False,
) -> None:
    """Remove the schedules and consumers of deleted jobs; refuses while runs wait for one of them.

    Delayed runs, retries and runs that wait for a place in a limit count, too.
    """
    from holdfast.deploy.register import unregister

    async with connected() as client:
        removed = await unregister(client, group, jobs, discard=discard, dry_run=dry_run)
    if out.as_json(removed):
        return
    done = "would be removed" if dry_run else "removed"
    for what, names in (("consumers", removed.consumers), ("schedules", removed.schedules)):
        out.say(f"{app}: {len(names)} {what} {done}: {', '.join(names) or 'there were none'}")


@command("deploy local")
def local(
    port: Annotated[
        int | None, option("Port of the server; default: 4222.", min=1, max=65_535)
    ] = None,
    store: Annotated[
        Path, option("Directory that keeps the data.", "DIR", file_okay=False)
    ] = STORE,
    log_level: LogLevel = None,
    log_format: LogFormat = None,
) -> None:
    """Run the project in this directory on this machine: server, control plane, every worker.

    Accepted runs survive a restart: the data stays in --store. Ctrl-C stops everything.
    """
    import tempfile

    from holdfast.cli.server import PORT, monitor_port_of
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
        out.say(
            f"{len(project.jobs)} jobs run on {server.url}, data in {store}. Ctrl-C stops them."
        )
        code = run_loop(run(project, server.url, Path(folder)))
    raise typer.Exit(code)
