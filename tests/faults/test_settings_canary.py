"""A canary secret, looked for everywhere after a run in which much goes wrong."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import secrets
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from holdfast.broker import Broker
from holdfast.config import ConnectionConfig
from holdfast.identity.users import UserFolder
from holdfast.names import kv_subject
from holdfast.server import Server
from tests.faults.processes import ROOT, Process
from tests.support import until

CANARY = f"canary-{secrets.token_hex(8)}-plaintext"
AGENTS = ("web1", "web2")


class Site:
    """A server with logins and permissions, and every kind of process beside it."""

    def __init__(self, root: Path, server: Server) -> None:
        self.root = root
        self.server = server
        self.folder = UserFolder(root / "auth")
        self.processes: dict[str, Process] = {}
        self.told: list[str] = []
        """Everything that commands and HTTP said."""

    def env(self, user: str) -> dict[str, str]:
        return {
            "HOLDFAST_NATS_URL": self.server.url,
            "HOLDFAST_NAMESPACE": "hf",
            "HOLDFAST_CREDENTIALS_FILE": str(self.folder.credentials(user)),
        }

    def start(self, name: str, user: str, *command: str, **env: str) -> Process:
        log = self.root / "logs" / f"{name}.log"
        log.parent.mkdir(exist_ok=True)
        process = Process(list(command), self.server.url, "hf", log, **self.env(user), **env)
        self.processes[name] = process
        return process

    async def cli(self, *words: str, stdin: str = "", code: int = 0) -> str:
        """A command of an operator; what it says is kept."""
        done = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-m", "holdfast", *words],
            env=os.environ | self.env("operator") | {"PYTHONPATH": str(ROOT)},
            input=stdin.encode(),
            capture_output=True,
            cwd=self.root,
        )
        said = done.stdout.decode() + done.stderr.decode()
        self.told.append(said)
        assert done.returncode == code, said
        return said

    def get(self, url: str) -> str:
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:
                text: str = answer.read().decode()
        except urllib.error.HTTPError as error:
            text = error.read().decode()
        self.told.append(text)
        return text


async def test_canary_secret_is_found_nowhere_but_in_the_snapshots(
    tmp_path: Path, report: Callable[[str], None]
) -> None:
    """Not in the store, a log, an answer, an error, a dead letter or a return; 0 hits.

    The secret is set, sealed, published, changed, rotated, used and mishandled by jobs, printed by
    a program on the agent; a push fails, a box is tampered with.
    """
    folder = UserFolder(tmp_path / "auth")
    folder.init("hf")
    folder.add_agents(AGENTS, [1])
    store = tmp_path / "store"
    with Server(store=store, fast=True, includes=[folder.config]) as server:
        site = Site(tmp_path, server)
        try:
            await _story(site)
        finally:
            for process in site.processes.values():
                process.close()
        server.stop()
    needles = [CANARY.encode(), base64.b64encode(CANARY.encode())[:-4]]
    logs = {path.name: path.read_bytes() for path in (tmp_path / "logs").iterdir()}
    stored = [path for path in store.rglob("*") if path.is_file()]
    tree = [path for path in (tmp_path / "tree").rglob("*") if path.is_file()]
    for needle in needles:
        assert not [path for path in [*stored, *tree] if needle in path.read_bytes()]
        assert not [name for name, text in logs.items() if needle in text]
        assert not [text for text in site.told if needle in text.encode()]
    snapshots = [tmp_path / "state" / agent / "settings.json" for agent in AGENTS]
    assert all(CANARY.encode() in path.read_bytes() for path in snapshots)  # it was really there
    assert any(b"***" in text for text in logs.values())
    size = sum(path.stat().st_size for path in stored)
    report(
        f"0 hits in {len(stored)} files of the store ({size:,} bytes), {len(logs)} logs and "
        f"{len(site.told)} answers"
    )


async def _story(site: Site) -> None:
    tree = site.root / "tree"
    tree.mkdir()
    (tree / "top.yaml").write_text("base: {'web*': [db]}\n")
    (tree / "db.yaml").write_text("db:\n  host: db1\n")
    await site.cli("secrets", "set", "tree/db.yaml", "db.password", stdin=CANARY + "\n")
    await site.cli("settings", "push", "tree")
    _start_processes(site)
    await until(lambda: _all_on(site, 1), 120, "both agents on revision 1")
    web = await _web(site)
    assert json.loads(await site.cli("settings", "get", "web1", "--json"))["db"]["host"] == "db1"
    await _jobs(site)
    await _fleet(site)
    await _failures(site, tree)
    await site.cli("secrets", "rotate")
    await until(lambda: _all_on(site, 3), 60, "both agents on revision 3")
    await site.cli("secrets", "rotate", "--finish")
    await until(lambda: _all_on(site, 4), 60, "both agents on revision 4")
    await site.cli("settings", "status")
    _browse(site, web)


def _start_processes(site: Site) -> None:
    seed = str(site.root / "auth" / "account.seed")
    site.start("dispatcher", "dispatcher", "dispatcher", HOLDFAST_DISPATCHER_SEED_FILE=seed)
    for agent in AGENTS:
        data = str(site.root / "state" / agent)
        site.start(agent, f"agent-{agent}", "agent", "--data", data, "--allow-commands")
    snapshot = str(site.root / "state" / "web1" / "settings.json")
    site.start(
        "worker",
        "worker",
        "worker",
        "tests.faults.settings_app:app",
        HOLDFAST_WORKER_SETTINGS_FILE=snapshot,
    )


def _all_on(site: Site, number: int) -> bool:
    found = [site.root / "state" / agent / "settings.json" for agent in AGENTS]
    return all(p.exists() and json.loads(p.read_bytes())["number"] == number for p in found)


async def _web(site: Site) -> str:
    process = site.start("web", "web", "web", "--port", "0")
    found = await until(lambda: re.search(r"http://[\d.:]+", process.text()), 60, "the web")
    return str(found[0])


async def _jobs(site: Site) -> None:
    """One job that works and one that fails with the secret in its error: a dead letter."""
    said = await site.cli("enqueue", "login", "--wait", "60")
    assert "db1 at revision 1" in said
    await site.cli("enqueue", "leak", "--wait", "60", code=3)
    letters = await site.cli("dead", "list", "--json")
    assert "authentication failed" in letters
    assert "***" in letters


async def _fleet(site: Site) -> None:
    """Operators ask for the secret in every way they have."""
    snapshot = str(site.root / "state" / "web1" / "settings.json")
    assert "(secret)" in await site.cli("fleet", "run", "web1", "settings.get", "db.password")
    printed = await site.cli("fleet", "run", "web1", "cmd.run", "cat", snapshot)
    assert "***" in printed


async def _failures(site: Site, tree: Path) -> None:
    """A tree that is wrong where the secret stands, and a box that was tampered with."""
    good = (tree / "db.yaml").read_text()
    for bad in (
        f"db: {{password: !encrypted '{CANARY}\n",
        f"db: {{password: !encrypt {CANARY}}}\n",
        f"db:\n  password: !encrypted {CANARY}\n  copy: {CANARY}\n",
    ):
        (tree / "db.yaml").write_text(bad)
        await site.cli("settings", "push", "tree", code=1)
    (tree / "db.yaml").write_text(good.replace("db1", "db2"))
    await site.cli("settings", "diff", "tree")
    config = ConnectionConfig(
        nats_url=site.server.url, credentials_file=str(site.folder.credentials("operator"))
    )
    async with Broker(config) as broker:
        subject = kv_subject(broker.names.secrets, "web2")
        await broker.store(subject, b'{"boxes":{"db:db.password":{"1-x":{"1":"AAAA"}}}}')
    await site.cli("settings", "push", "tree")
    await until(lambda: _all_on(site, 2), 60, "both agents on revision 2")


def _browse(site: Site, url: str) -> None:
    """Every address of the API and of the pages that needs nothing to be filled in."""
    paths = json.loads(site.get(f"{url}/api/v1/openapi.json"))["paths"]
    plain = [path for path, verbs in paths.items() if "get" in verbs and "{" not in path]
    assert len(plain) > 8
    for path in [*plain, "/", "/runs", "/dead", "/jobs", "/cluster", "/metrics"]:
        site.get(url + path)
