"""The runbooks of docs/operations/keys.md, carried out as they stand there."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from holdfast.broker import Broker
from holdfast.config import ConnectionConfig
from holdfast.errors import NotConnected
from tests.faults.runbook import Load, Shell, commands, repeated
from tests.integration.auth_support import guarded
from tests.integration.command import Command
from tests.support import until

SECRET = "s3cret-of-the-database"
QUICK = {"HOLDFAST_DISPATCHER_ACK_SECONDS": "1", "HOLDFAST_DISPATCHER_GRACE_SECONDS": "1"}
OLDER = "credentials are older than the dispatchers' generation"


class Watch:
    """The shell of somebody who looks after a site."""

    def __init__(self, folder: Path, stack: AsyncExitStack) -> None:
        self.folder = folder
        pid_file = folder / "nats.pid"
        options: dict[str, Any] = {"name": "secrets", "extra_config": f'pid_file: "{pid_file}"'}
        self.site = stack.enter_context(guarded(folder, (), **options))
        self.server = self.site.server
        self.users = self.site.folder
        self.stack = stack
        self.env = {"HOLDFAST_NATS_URL": self.server.url} | QUICK
        self.shell = Shell(folder, self.env | self.login("operator"))
        self._reload = (commands("keys.md", "Reload the servers")[0], str(pid_file))
        self._reloads = 0

    def login(self, user: str) -> dict[str, str]:
        return {"HOLDFAST_CREDENTIALS_FILE": self.site.file(user)}

    async def reload(self) -> None:
        """As the page says; over when the server has told so."""
        text, pid_file = self._reload
        self._reloads += 1
        await self.shell.run(text, {"/var/run/nats/nats.pid": pid_file})

        def taken() -> bool:
            log = self.server.log_path.read_text()
            return log.count("Reloaded server configuration") >= self._reloads

        await until(taken, what="the reload")

    def keep(self, user: str) -> Path:
        """A copy of a login, as a thief would have it."""
        kept = self.folder / f"kept-{user}.json"
        shutil.copy(self.users.credentials(user), kept)
        return kept

    async def refuses(self, login: Path) -> bool:
        """Whether the server lets nobody in with it."""
        config = ConnectionConfig(nats_url=self.server.url, credentials_file=str(login))
        try:
            async with Broker(config):
                return False
        except NotConnected as error:
            return "refuses the login" in str(error)

    async def agent(self, id: str, login: Path, data: str = "") -> Command:
        """An agent that is online."""
        env = self.env | {"HOLDFAST_CREDENTIALS_FILE": str(login)}
        words = ("agent", "--id", id, "--data", str(self.folder / (data or id)))
        new = Command(*words, folder=self.folder, cwd=self.folder, env=env)
        self.stack.enter_context(new)
        await until(lambda: self.answers(id), what=f"an answer of {id}:\n{new.text}")
        return new

    async def replace(self, agent: Command) -> None:
        """Stop an agent, to start it with another file."""
        agent.signal(signal.SIGTERM)
        assert await agent.ended() == 0, agent.text

    async def finished(self, text: str) -> bool:
        """Whether a rotation can be ended: it is refused until every agent has the new keys."""
        try:
            await self.shell.run(text)
        except AssertionError:
            return False
        return True

    async def answers(self, id: str) -> bool:
        """Whether a command is executed there."""
        env = self.env | self.login("operator")
        words = ("fleet", "run", id, "ping", "--timeout", "3s")
        with Command(*words, folder=self.folder, cwd=self.folder, env=env) as asked:
            return await asked.ended() == 0


@pytest.mark.timeout(180)
async def test_rotated_login_loses_nothing_and_the_old_one_is_refused(
    tmp_path: Path, report: Callable[[str], None]
) -> None:
    """Under load: the workers go on with the new login, every run has its effect once, no slot is
    missed, and after the last step nobody gets in with the old one."""
    issue, replace, revoke = commands("keys.md", "Rotate a login")
    async with AsyncExitStack() as stack:
        watch = Watch(tmp_path, stack)
        load = Load(tmp_path, watch.env, stack)
        await load.start("control", **watch.login("control"))
        await load.start("worker", **watch.login("worker"))
        old = watch.keep("worker")
        login = str(watch.users.credentials("client"))
        async with load.sending(nats_url=watch.server.url, credentials_file=login):
            await load.more_slots()
            await watch.shell.run(issue)
            await watch.reload()
            await watch.shell.run(replace)
            await load.start("worker", **watch.login("worker"))
            await load.stop_oldest("worker")
            assert not await watch.refuses(old)
            await watch.shell.run(revoke)
            await watch.reload()
            assert await watch.refuses(old)
            await load.more_slots()
        await load.all_done(load.accepted)
        assert not await watch.refuses(watch.users.credentials("worker"))
        listed = json.loads(await watch.shell.run("holdfast auth list --json --dir secrets"))
        await watch.shell.run("holdfast doctor")
    assert [u["user"] for u in listed if u.get("revoked")] == ["worker"]
    assert repeated(load.done()) == []
    assert load.missed() == []
    assert repeated(load.slots()) == []
    report(f"{len(load.accepted)} runs, {len(load.slots())} slots, {load.refused} sends refused")


@pytest.mark.timeout(180)
async def test_rotated_command_keys_are_obeyed_and_the_old_ones_refused(tmp_path: Path) -> None:
    """Each step leaves an agent that obeys; at the end one that signs with the old generation is
    not obeyed, nor lets the server in who has the agent's old login; an agent that was left out
    refuses what the new generation signs."""
    both, alone = commands("keys.md", "Rotate the keys of commands")
    async with AsyncExitStack() as stack:
        watch = Watch(tmp_path, stack)
        await watch.shell.run("holdfast auth agent web1 web2 --dir secrets")
        await watch.reload()
        load = Load(tmp_path, watch.env, stack)
        seed = {"HOLDFAST_DISPATCHER_SEED_FILE": str(tmp_path / "secrets" / "account.seed")}
        first = watch.login("control") | seed
        second = first | {"HOLDFAST_DISPATCHER_GENERATION": "2"}
        await load.start("control", **first)
        old = watch.keep("agent-web1")
        agent = await watch.agent("web1", old)
        left_out = await watch.agent("web2", watch.users.credentials("agent-web2"))

        await watch.shell.run(both)
        await watch.reload()
        assert await watch.refuses(old)
        await watch.replace(agent)
        agent = await watch.agent("web1", watch.users.credentials("agent-web1"))
        await load.start("control", **second)
        await load.stop_oldest("control")
        await until(lambda: watch.answers("web1"), what="an answer to the new generation")
        assert not await watch.answers("web2")
        assert OLDER in left_out.text

        await watch.shell.run(alone)
        await watch.reload()
        await watch.replace(agent)
        agent = await watch.agent("web1", watch.users.credentials("agent-web1"))
        await load.start("control", **first)
        await load.stop_oldest("control")
        assert not await watch.answers("web1")
        assert OLDER in agent.text


@pytest.mark.timeout(180)
async def test_rotated_settings_keys_are_read_and_the_old_ones_refused(tmp_path: Path) -> None:
    """The agent follows pushes before, while and after its keys are rotated; one that has the old
    keys alone is let in by the server, for its login is good, and takes no settings."""
    begin, status, finish = commands("keys.md", "Rotate the keys of settings")[0].splitlines()
    push = "holdfast settings push tree --seed secrets/account.seed"
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "top.yaml").write_text("base: {'web*': [db]}\n")

    def taken(data: str, value: str) -> bool:
        path = tmp_path / data / "settings.json"
        return path.exists() and value in path.read_text()

    async with AsyncExitStack() as stack:
        watch = Watch(tmp_path, stack)
        await watch.shell.run("holdfast auth agent web1 --dir secrets")
        await watch.reload()
        seed = {"HOLDFAST_DISPATCHER_SEED_FILE": str(tmp_path / "secrets" / "account.seed")}
        load = Load(tmp_path, watch.env, stack)
        await load.start("control", **watch.login("control"), **seed)
        login = watch.users.credentials("agent-web1")
        agent = await watch.agent("web1", login)

        async def publish(value: str) -> None:
            (tree / "db.yaml").write_text(f"db: {{password: !encrypted {value}}}\n")
            await watch.shell.run(push)

        await publish(f"{SECRET}-1")
        await until(lambda: taken("web1", f"{SECRET}-1"), what="the first secret")
        await watch.shell.run(begin)
        await publish(f"{SECRET}-2")
        await until(lambda: taken("web1", f"{SECRET}-2"), what="a secret while it is under way")
        await until(lambda: watch.finished(finish), what="the end of the rotation")
        assert "2" in await watch.shell.run(status)
        await publish(f"{SECRET}-3")
        await until(lambda: taken("web1", f"{SECRET}-3"), what="a secret of the new keys")
        await watch.replace(agent)
        thief = await watch.agent("web1", login, "elsewhere")
        await thief.says("signed with generation 2 of the account's keys and this agent has 1")
        assert not taken("elsewhere", SECRET)
