"""`holdfast worker APP`: one process that executes runs, or several under a supervisor."""

from __future__ import annotations

import logging
import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.common import complain, connection_given, given

if TYPE_CHECKING:
    from pathlib import Path

    from holdfast.config import WorkerConfig
    from holdfast.worker.supervisor import Spec

SOCKET_VARIABLE = "HOLDFAST_INTERNAL_SOCKET"
"""Set by a supervisor for its processes: where to serve health. Not for users."""
STOP_MARGIN_SECONDS = 10.0
"""What a process may take beyond its grace period to give runs back and say goodbye."""

AppArgument = Annotated[
    str, typer.Argument(metavar="APP", help="The app, as module:object (shop:app).")
]
LogLevel = Annotated[str | None, typer.Option("--log-level", help="debug, info, warning or error.")]
LogFormat = Annotated[str | None, typer.Option("--log-format", help="text or json.")]


def register(app: typer.Typer) -> None:
    app.command("worker")(worker)


def worker(
    app: AppArgument,
    group: Annotated[
        str | None, typer.Option("--group", help="Group whose jobs it runs.", metavar="NAME")
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option("--concurrency", help="Runs that one process executes at a time.")
    ] = None,
    processes: Annotated[
        int | None, typer.Option("--processes", help="Processes that share the work.")
    ] = None,
    max_runs: Annotated[
        int | None,
        typer.Option("--max-runs", help="Runs after which a process is replaced; 0: never."),
    ] = None,
    grace: Annotated[
        str | None,
        typer.Option("--grace", help="How long handlers may go on after SIGTERM.", metavar="TIME"),
    ] = None,
    health_port: Annotated[
        int | None, typer.Option("--health-port", help="Serve health and metrics here; 0: nowhere.")
    ] = None,
    health_host: Annotated[
        str | None, typer.Option("--health-host", help="Address of --health-port.", metavar="HOST")
    ] = None,
    log_level: LogLevel = None,
    log_format: LogFormat = None,
) -> None:
    """Execute the runs of one group until SIGTERM or Ctrl-C.

    The first signal drains: what runs may finish within the grace period, the rest is given back.
    A second one exits at once. Exit codes: 0 after a drain or after --max-runs, 1 when it cannot go
    on, 128 + signal when it was told twice. Whatever has no flag here is in docs/configuration.md.
    """
    from holdfast.config import WorkerConfig, load

    start_logging(log_level, log_format)
    config = load(
        WorkerConfig,
        group=group,
        concurrency=concurrency,
        processes=processes,
        max_runs=max_runs,
        grace_seconds=grace,
        health_port=health_port,
        health_host=health_host,
    )
    socket = os.environ.pop(SOCKET_VARIABLE, "")
    if config.processes > 1 and not socket:
        raise typer.Exit(_supervise(config))
    raise typer.Exit(_work(app, config, socket))


def start_logging(level: str | None, style: str | None) -> None:
    """Log as flags, environment and file say."""
    from holdfast.config import LogConfig, load
    from holdfast.telemetry import configure_logging

    config = load(LogConfig, level=level or ("debug" if given().verbose else None), format=style)
    configure_logging(config.level, config.format)


def _work(target: str, config: WorkerConfig, socket: str) -> int:
    from holdfast.cli.loading import load_app
    from holdfast.config import RecordConfig, load
    from holdfast.errors import ConfigError
    from holdfast.process import run_role
    from holdfast.telemetry import Telemetry
    from holdfast.worker.supervisor import CONFIG_EXIT
    from holdfast.worker.worker import Worker

    try:
        app = load_app(target)
        connection = app.connection_config(**connection_given())
        records = load(RecordConfig)
        telemetry = Telemetry()
        worker = Worker(
            app,
            config,
            connection=connection,
            records=records,
            telemetry=telemetry,
            health_path=socket,
            whole_process=True,
        )
    except ConfigError as error:
        if not socket:
            raise
        complain(str(error))
        return CONFIG_EXIT
    try:
        return run_role(lambda: worker)
    except Exception:
        # A hook of the user's, or a bug: either way somebody has to see where.
        logging.getLogger("holdfast.worker").exception("the worker cannot go on")
        return 1


def _supervise(config: WorkerConfig) -> int:
    """Run the same command in several processes; health and metrics stay on one port."""
    import tempfile
    from pathlib import Path

    from holdfast.process import run_loop

    with tempfile.TemporaryDirectory(prefix="holdfast-worker-") as folder:
        command = [sys.executable, "-m", "holdfast", *sys.argv[1:]]
        specs = [process_spec(Path(folder), n, command) for n in range(config.processes)]
        return run_loop(_supervised(specs, config, folder))


def process_spec(folder: Path, number: int, command: list[str]) -> Spec:
    """One of several processes, with a socket for its health in a private folder."""
    from holdfast.worker.supervisor import Spec

    socket = folder / f"{number}.sock"
    return Spec(f"process {number}", command, {SOCKET_VARIABLE: str(socket)}, socket)


async def _supervised(specs: list[Spec], config: WorkerConfig, folder: str) -> int:
    import shutil

    from holdfast.config import LivenessConfig, load
    from holdfast.health import HealthServer
    from holdfast.model.liveness import from_config
    from holdfast.process import handle_signals
    from holdfast.worker.supervisor import Merged, Supervisor

    grace = from_config(load(LivenessConfig), config.grace_seconds).grace_seconds
    supervisor = Supervisor(specs, stop_seconds=grace + STOP_MARGIN_SECONDS)

    def kill() -> None:
        supervisor.kill()
        shutil.rmtree(folder, ignore_errors=True)

    handle_signals(supervisor.stop, kill)
    merged = Merged(supervisor.keepers)
    async with HealthServer(config.health_host, config.health_port, merged.health):
        return await supervisor.run()
