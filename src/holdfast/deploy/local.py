"""Runs a whole project on this machine as on Kubernetes: server, control plane, workers.

Each directory is registered first, then gets one worker process per group. Processes that die are
restarted; a signal stops all of them, workers first.
"""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from holdfast.deploy.project import JOBS, SHARED, JobDirectory, Project, plain_environment
from holdfast.errors import ConfigError
from holdfast.process import handle_signals
from holdfast.worker.supervisor import Spec, Supervisor

GRACE = "3s"  # short: a developer is waiting
STOP_SECONDS = 13.0  # the grace period, and the 10 s a cancelled handler may clean up


def _python(project: Project, job: JobDirectory) -> str:
    own = project.root / JOBS / job.name / ".venv" / "bin" / "python"
    return str(own) if own.exists() else sys.executable


def _env(project: Project, job: JobDirectory, url: str) -> dict[str, str]:
    """The directory's modules first, then the shared ones."""
    root = project.root.resolve()
    paths = [str(root / JOBS / job.name), str(root / SHARED), os.environ.get("PYTHONPATH", "")]
    own = {"HOLDFAST_NATS_URL": url, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return plain_environment(job.pods) | own


def register_all(project: Project, url: str) -> None:
    """Create consumers and schedules of every directory, before any worker runs."""

    def register(job: JobDirectory) -> None:
        command = [_python(project, job), "-m", "holdfast", "deploy", "register", job.config.app]
        env = os.environ | _env(project, job, url)
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        if done.returncode:
            raise ConfigError(f"{job.name} cannot be registered: {done.stderr.strip()}")

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(register, project.jobs))


def specs(project: Project, url: str, folder: Path) -> list[Spec]:
    """The control plane, and one worker per group of each directory."""
    ready = folder / "control.ready"
    command = [sys.executable, "-m", "holdfast", "control", "--ready-file", str(ready)]
    found = [Spec("control", command, {"HOLDFAST_NATS_URL": url}, ready)]
    for job in project.jobs:
        for group in job.groups:
            name = job.workers(group)
            command = [_python(project, job), "-m", "holdfast", "worker", job.config.app]
            command += ["--group", group.name, "--grace", GRACE]
            found.append(Spec(f"worker {name}", command, _env(project, job, url)))
    return found


async def run(project: Project, url: str, folder: Path) -> int:
    """Run until a signal; returns the exit code."""
    supervisor = Supervisor(specs(project, url, folder), stop_seconds=STOP_SECONDS)
    handle_signals(supervisor.stop, supervisor.kill)
    return await supervisor.run()
