"""The runbooks "Backup" and "Restore" of docs/operations/nats.md, as they stand there."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from holdfast.identity.users import UserFolder
from holdfast.server import Cluster
from tests.faults.runbook import Load, Shell, commands, repeated
from tests.faults.test_rollout import effects
from tests.support import until


def reload(nats: Cluster) -> None:
    for node in nats.nodes:
        node.reload()


@pytest.mark.timeout(180)
async def test_runs_of_a_backup_are_worked_after_its_restore(
    tmp_path: Path, report: Callable[[str], None]
) -> None:
    """A backup under load, all servers and stores lost, a restore into new ones: every run that was
    accepted before the backup began has its effect, what was done is not done again, no slot is
    missed, and epochs go on above the one that was named."""
    users = UserFolder(tmp_path / "secrets")
    users.init("hf")
    login, save, restore = *commands("nats.md", "Backup"), *commands("nats.md", "Restore")
    operator = str(users.credentials("backup"))
    async with AsyncExitStack() as stack:
        old = Cluster(store=tmp_path / "old", fast=True, includes=[users.config])
        stack.enter_context(old)
        ports = [node.port for node in old.nodes]
        env = {"HOLDFAST_NATS_URL": old.url}
        worker = {"HOLDFAST_CREDENTIALS_FILE": str(users.credentials("worker"))}
        control = {"HOLDFAST_CREDENTIALS_FILE": str(users.credentials("control"))}
        shell, load = Shell(tmp_path, env), Load(tmp_path, env, stack)
        await load.start("control", **control)
        await load.start("worker", **worker)
        client = {"nats_url": old.url, "credentials_file": str(users.credentials("client"))}
        async with load.sending(**client):
            await load.more_slots()
            await shell.run(login)
            reload(old)
            await until(lambda: len(load.accepted) > 20, what="some runs")
            before, done, slots = list(load.accepted), load.done(), load.slots()
            await shell.run(save)
        reload(old)
        during = len(load.accepted) - len(before)
        load.kill_all()
        for node in old.nodes:
            node.kill()
        shutil.rmtree(tmp_path / "old")

        new = Cluster(store=tmp_path / "new", fast=True, ports=ports, includes=[users.config])
        stack.enter_context(new)
        await shell.run(login)
        reload(new)
        highest = 3_000
        printed = await shell.run(restore, {"100000": str(highest)})
        reload(new)
        assert "the next epoch is above" in printed, printed
        began = time.time()
        await load.start("control", **control)
        await load.start("worker", **worker)
        await load.all_done(before)
        await load.more_slots()
        await until(lambda: max(load.slots()) > began and not load.missed(), what="every slot")
    again = [run for run in done if load.done()[run] > 1]
    assert again == [], "done before the backup, and again after it"
    assert [s for s in slots if load.slots()[s] > 1] == [], "fired before the backup, and again"
    assert not Path(operator).exists(), "the login of the backup is left"
    attempts = {attempt for run, attempt in effects(tmp_path, "work") if run in before}
    report(
        f"{len(before)} runs before the backup, {during} while it was written; attempts {attempts};"
        f" {len(load.slots())} slots, {len(repeated(load.slots()))} fired after it and again"
    )
