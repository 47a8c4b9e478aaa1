"""Restart strategies chosen by configuration: what wins over what."""

from __future__ import annotations

import pytest

from holdfast import Holdfast, Worker
from holdfast.config import WorkerConfig


def _app() -> Holdfast:
    app = Holdfast("shop")
    app.group("payments", restart="after_grace")
    app.group("rockets", fallback="fail")

    @app.job(group="payments")
    async def charge() -> None: ...

    @app.job(group="payments", restart="immediately")
    async def notify() -> None: ...

    @app.job(group="rockets")
    async def launch() -> None: ...

    @app.job
    async def resize() -> None: ...

    @app.job(delivery="at_least_once")
    async def loose() -> None: ...

    @app.job(delivery="at_most_once")
    async def once() -> None: ...

    return app


def _chosen(group: str, **given: str) -> dict[str, str]:
    worker = Worker(_app(), WorkerConfig(group=group, **given))  # type: ignore[arg-type]
    return {name: job.spec.restart for name, job in worker.jobs.items()}


def test_default_is_for_jobs_about_which_nothing_is_said() -> None:
    """`worker.restart` fills what code leaves open, and nothing else."""
    assert _chosen("default", restart="never") == {
        "resize": "never",
        "loose": "immediately",
        "once": "never",
    }
    assert _chosen("payments", restart="never")["charge"] == "after_grace"
    assert _chosen("rockets", restart="after_grace") == {"launch": "after_grace"}


@pytest.mark.parametrize("strategy", ["immediately", "after_grace", "never"])
def test_group_is_configured_before_what_its_code_says(strategy: str) -> None:
    """`worker.group_restart` replaces `app.group(restart=…)`; what a job itself says stands."""
    chosen = _chosen("payments", restart="never", group_restart=f"payments={strategy}")
    assert chosen == {"charge": strategy, "notify": "immediately"}


def test_nothing_configured_changes_nothing() -> None:
    """Without configuration the code decides, as ever."""
    assert _chosen("payments") == {"charge": "after_grace", "notify": "immediately"}
    assert _chosen("default") == {"resize": "immediately", "loose": "immediately", "once": "never"}
    app = _app()
    assert Worker(app, WorkerConfig()).jobs["resize"] is app.jobs["resize"]
