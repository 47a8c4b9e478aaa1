"""`holdfast worker APP`: one process that executes runs, or several under a supervisor."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from typing import TYPE_CHECKING, Annotated, Any

from holdfast.cli import out
from holdfast.cli.command import command
from holdfast.cli.options import AppArgument, connection_given, given, option
from holdfast.cli.processes import role_command

if TYPE_CHECKING:
    from pathlib import Path

    from holdfast.config import WorkerConfig
    from holdfast.worker.supervisor import Spec

SOCKET_VARIABLE = "HOLDFAST_INTERNAL_SOCKET"
"""Set by a supervisor for its processes: where to serve health. Internal."""
STOP_MARGIN_SECONDS = 10.0
"""The time that a process has after its grace period to give back runs and leave: as much as a
cancelled handler gets to clean up (`worker.cleanup_seconds`)."""


@command("worker")
@role_command
def worker(
    served: dict[str, Any],
    app: AppArgument,
    group: Annotated[str | None, option("Run the jobs of this group.", "NAME")] = None,
    concurrency: Annotated[int | None, option("Runs that one process executes at a time.")] = None,
    processes: Annotated[int | None, option("Number of processes that share the work.")] = None,
    max_runs: Annotated[
        int | None, option("Replace a process after this many runs; 0 means never.")
    ] = None,
    grace: Annotated[
        str | None, option("Time for handlers to finish after SIGTERM.", "TIME")
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
    from holdfast.threads import SameContext
    from holdfast.worker.logs import catching_prints
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
        out.complain(str(error))
        return CONFIG_EXIT

    def start() -> Worker:
        asyncio.get_running_loop().set_default_executor(SameContext())
        return worker

    try:
        with catching_prints() if config.run_log != "off" else contextlib.nullcontext():
            return run_role(start)
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
        command = [sys.executable, "-m", "holdfast", *given().arguments]
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
