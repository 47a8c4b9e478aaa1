"""`holdfast worker APP`: one process that executes runs, or several under a supervisor."""

from __future__ import annotations

import logging
import os
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.cli.common import Cli, complain, connection_given
from holdfast.cli.roles import AppArgument, role_command

if TYPE_CHECKING:
    from pathlib import Path

    from holdfast.config import WorkerConfig
    from holdfast.worker.supervisor import Spec

SOCKET_VARIABLE = "HOLDFAST_INTERNAL_SOCKET"
"""Set by a supervisor for its processes: where to serve health. Internal."""
STOP_MARGIN_SECONDS = 10.0
"""What a process may take beyond its grace period to give back runs and leave."""


def register(app: Cli) -> None:
    """Add `holdfast worker`."""
    app.command("worker")(role_command(worker))


def worker(
    served: dict[str, Any],
    app: AppArgument,
    group: Annotated[
        str | None, typer.Option("--group", metavar="NAME", help="Run the jobs of this group.")
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option("--concurrency", help="Runs that one process executes at a time.")
    ] = None,
    processes: Annotated[
        int | None, typer.Option("--processes", help="Number of processes that share the work.")
    ] = None,
    max_runs: Annotated[
        int | None,
        typer.Option("--max-runs", help="Replace a process after this many runs; 0 means never."),
    ] = None,
    grace: Annotated[
        str | None,
        typer.Option("--grace", metavar="TIME", help="Time for handlers to finish after SIGTERM."),
    ] = None,
) -> int:
    """Execute the runs of one group until SIGTERM or Ctrl-C.

    The first signal drains: handlers may finish within the grace period, the rest is given back. A
    second one exits at once. Exit codes: 0 after a drain or after --max-runs, 1 when it cannot
    continue, 128 + signal after a second signal. Options without a flag are in
    docs/configuration.md.
    """
    from holdfast.config import WorkerConfig, load

    config = load(
        WorkerConfig,
        group=group,
        concurrency=concurrency,
        processes=processes,
        max_runs=max_runs,
        grace_seconds=grace,
        **served,
    )
    socket = os.environ.pop(SOCKET_VARIABLE, "")
    if config.processes > 1 and not socket:
        return _supervise(config)
    return _work(app, config, socket)


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
        # A user's hook failed, or a bug: either way the traceback is needed.
        logging.getLogger("holdfast.worker").exception("the worker cannot continue")
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
