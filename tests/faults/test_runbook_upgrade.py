"""The runbook "Upgrade NATS" of docs/operations/nats.md, carried out as it stands there.

By default the same version is rolled through the same steps, so that the tests need no other
server. `HOLDFAST_NATS_BEFORE=/path/to/an/older/nats-server` begins with that one, and
`HOLDFAST_NATS_AFTER` ends with another: the upgrade is then a true one. It was carried out so from
2.12.6 to 2.14.6, and from there to 2.15.1.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from unittest.mock import patch

import pytest

from holdfast.config import DeployConfig
from holdfast.deploy.project import Project
from holdfast.identity.users import UserFolder
from holdfast.server.process import Process, find_binary, free_ports
from tests.faults.runbook import Load, Shell, commands, repeated
from tests.integration.rendered_nats import server_config_here
from tests.support import until

BEFORE = Path(os.environ.get("HOLDFAST_NATS_BEFORE") or find_binary())
AFTER = Path(os.environ.get("HOLDFAST_NATS_AFTER") or find_binary())
GRACE = "lame_duck_grace_period: 5s"


class Rolled:
    """Three servers of the rendered configuration, each of which may get another binary."""

    def __init__(self, root: Path, users: UserFolder) -> None:
        self._project = Project(root, DeployConfig(name="acme", tls="off"), (), "hf")
        self._ports = tuple(free_ports(2 + self._project.config.nats_replicas))
        self._root = root
        self.users = users
        self.servers: list[Process] = []
        self.hosts = [f"127.0.0.{n + 1}" for n in range(self._project.config.nats_replicas)]
        self.url = ",".join(f"nats://{host}:{self._ports[0]}" for host in self.hosts)

    def monitor(self, number: int) -> str:
        return f"{self.hosts[number]}:{self._ports[1]}"

    def folder(self, number: int) -> Path:
        return self._root / f"nats-{number}"

    def spawn(self, number: int, binary: Path) -> Process:
        """One server on its store; a shorter grace period keeps the test short."""
        folder = self.folder(number)
        folder.mkdir(exist_ok=True)
        config = server_config_here(self._project, number, self._ports, folder)
        assert GRACE in config
        config = config.replace(GRACE, "lame_duck_grace_period: 1s")
        with patch("holdfast.server.process.find_binary", lambda: binary):
            return Process(config, folder, folder / "log")

    def start(self, binary: Path) -> None:
        self.servers = [self.spawn(number, binary) for number in range(len(self.hosts))]

    def kill(self) -> None:
        for server in self.servers:
            server.kill()
            server.exited.wait()


async def version_of(binary: Path) -> str:
    asked = await asyncio.create_subprocess_exec(
        str(binary), "--version", stdout=asyncio.subprocess.PIPE
    )
    return (await asked.communicate())[0].decode().split("v")[-1].strip()


@pytest.mark.timeout(240)
async def test_upgrade_of_nats_loses_and_misses_nothing(
    tmp_path: Path, report: Callable[[str], None]
) -> None:
    """Server by server, in lame-duck mode, under load: every accepted run has its effect once, no
    slot is missed or fired twice, and `doctor` is content with the new version on all."""
    users = UserFolder(tmp_path / "users")
    users.init("hf")
    [steps] = commands("nats.md", "Upgrade NATS")
    leave, healthy, version = steps.splitlines()
    nats = Rolled(tmp_path, users)
    async with AsyncExitStack() as stack:
        stack.callback(nats.kill)
        nats.start(BEFORE)
        env = {"HOLDFAST_NATS_URL": nats.url, "HOLDFAST_REPLICAS": "3"}
        operator = {"HOLDFAST_CREDENTIALS_FILE": str(users.credentials("operator"))}
        shell, load = Shell(tmp_path, env | operator), Load(tmp_path, env, stack)

        async def at(number: int, line: str) -> str:
            return await shell.run(line, {"127.0.0.1:8222": nats.monitor(number)})

        async def everywhere(line: str) -> list[str]:
            return await asyncio.gather(*(at(n, line) for n in range(len(nats.hosts))))

        await everywhere(healthy)
        for role in ("control", "control", "worker", "worker"):
            await load.start(role, HOLDFAST_CREDENTIALS_FILE=str(users.credentials(role)))
        client = {"nats_url": nats.url, "credentials_file": str(users.credentials("client"))}
        async with load.sending(**client):
            await load.more_slots()
            for number, server in enumerate(nats.servers):
                pid_file = nats.folder(number) / "nats.pid"
                await shell.run(leave, {"/var/run/nats/nats.pid": str(pid_file)})
                await until(server.exited.is_set, 90, "the end of a server in lame-duck mode")
                nats.servers[number] = nats.spawn(number, AFTER)
                await at(number, healthy)
            await load.more_slots()
        await load.all_done(load.accepted)
        await load.more_slots()
        versions = await everywhere(version)
        monitors = [f"--monitor-url http://{nats.monitor(n)}" for n in range(len(nats.hosts))]
        found = json.loads(await shell.run(f"holdfast doctor --json {' '.join(monitors)}"))
    assert [one for one in found if one["level"] == "fail"] == []
    assert load.missed() == []
    assert repeated(load.slots()) == []
    assert repeated(load.done()) == []
    [after] = {text.strip() for text in versions}
    assert await version_of(AFTER) in after
    report(
        f"from {await version_of(BEFORE)}, {after}: {len(load.accepted)} runs, "
        f"{len(load.slots())} slots, {load.refused} sends refused"
    )
