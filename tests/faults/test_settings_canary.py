"""A canary secret, looked for everywhere after a run in which much goes wrong."""

from __future__ import annotations

import base64
import json
import re
import secrets
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from holdfast.names import kv_subject
from tests.faults.processes import ROOT, Process
from tests.integration.auth_support import NAMESPACE, Site, guarded
from tests.integration.cli_support import clean_environment, run_command
from tests.support import until

CANARY = f"canary-{secrets.token_hex(8)}-plaintext"
AGENTS = ("web1", "web2")


class Witness:
    """Starts every kind of process beside a site, and keeps what commands and HTTP say."""

    def __init__(self, root: Path, site: Site) -> None:
        self.root = root
        self.site = site
        self.processes: dict[str, Process] = {}
        self.told: list[str] = []

    def start(self, name: str, user: str, *command: str, **env: str) -> Process:
        log = self.root / "logs" / f"{name}.log"
        log.parent.mkdir(exist_ok=True)
        given = self.site.environment(user) | env
        process = Process(list(command), self.site.server.url, NAMESPACE, log, **given)
        self.processes[name] = process
        return process

    async def cli(self, *words: str, stdin: str = "", code: int = 0) -> str:
        """A command of an operator."""
        env = clean_environment() | self.site.environment("operator") | {"PYTHONPATH": str(ROOT)}
        done = await run_command(*words, env=env, cwd=self.root, stdin=stdin.encode())
        said = done.out + done.err
        self.told.append(said)
        assert done.code == code, said
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
    store = tmp_path / "store"
    with guarded(tmp_path, AGENTS, store=store) as site:
        witness = Witness(tmp_path, site)
        try:
            await _story(witness)
        finally:
            for process in witness.processes.values():
                process.close()
        site.server.stop()
    needles = [CANARY.encode(), base64.b64encode(CANARY.encode())[:-4]]
    logs = {path.name: path.read_bytes() for path in (tmp_path / "logs").iterdir()}
    stored = [path for path in store.rglob("*") if path.is_file()]
    tree = [path for path in (tmp_path / "tree").rglob("*") if path.is_file()]
    for needle in needles:
        assert not [path for path in [*stored, *tree] if needle in path.read_bytes()]
        assert not [name for name, text in logs.items() if needle in text]
        assert not [text for text in witness.told if needle in text.encode()]
    snapshots = [tmp_path / "state" / agent / "settings.json" for agent in AGENTS]
    assert all(CANARY.encode() in path.read_bytes() for path in snapshots)  # it was really there
    assert any(b"***" in text for text in logs.values())
    size = sum(path.stat().st_size for path in stored)
    report(
        f"0 hits in {len(stored)} files of the store ({size:,} bytes), {len(logs)} logs and "
        f"{len(witness.told)} answers"
    )


async def _story(witness: Witness) -> None:
    tree = witness.root / "tree"
    tree.mkdir()
    (tree / "top.yaml").write_text("base: {'web*': [db]}\n")
    (tree / "db.yaml").write_text("db:\n  host: db1\n")
    await witness.cli("secrets", "set", "tree/db.yaml", "db.password", stdin=CANARY + "\n")
    await witness.cli("settings", "push", "tree")
    _start_processes(witness)
    await until(lambda: _all_on(witness, 1), 120, "both agents on revision 1")
    web = await _web(witness)
    assert json.loads(await witness.cli("settings", "get", "web1", "--json"))["db"]["host"] == "db1"
    await _jobs(witness)
    await _fleet(witness)
    await _failures(witness, tree)
    await witness.cli("secrets", "rotate")
    await until(lambda: _all_on(witness, 3), 60, "both agents on revision 3")
    await witness.cli("secrets", "rotate", "--finish")
    await until(lambda: _all_on(witness, 4), 60, "both agents on revision 4")
    await witness.cli("settings", "status")
    _browse(witness, web)


def _start_processes(witness: Witness) -> None:
    seed = str(witness.root / "auth" / "account.seed")
    witness.start("dispatcher", "dispatcher", "dispatcher", HOLDFAST_DISPATCHER_SEED_FILE=seed)
    for agent in AGENTS:
        data = str(witness.root / "state" / agent)
        witness.start(agent, f"agent-{agent}", "agent", "--data", data, "--allow-commands")
    snapshot = str(witness.root / "state" / "web1" / "settings.json")
    witness.start(
        "worker",
        "worker",
        "worker",
        "tests.faults.settings_app:app",
        HOLDFAST_WORKER_SETTINGS_FILE=snapshot,
    )


def _all_on(witness: Witness, number: int) -> bool:
    found = [witness.root / "state" / agent / "settings.json" for agent in AGENTS]
    return all(p.exists() and json.loads(p.read_bytes())["number"] == number for p in found)


async def _web(witness: Witness) -> str:
    process = witness.start("web", "web", "web", "--port", "0")
    found = await until(lambda: re.search(r"http://[\d.:]+", process.text()), 60, "the web")
    return str(found[0])


async def _jobs(witness: Witness) -> None:
    """One job that works and one that fails with the secret in its error: a dead letter."""
    said = await witness.cli("enqueue", "login", "--wait", "60")
    assert "db1 at revision 1" in said
    await witness.cli("enqueue", "leak", "--wait", "60", code=3)
    letters = await witness.cli("dead", "list", "--json")
    assert "authentication failed" in letters
    assert "***" in letters


async def _fleet(witness: Witness) -> None:
    """Operators ask for the secret in every way they have."""
    snapshot = str(witness.root / "state" / "web1" / "settings.json")
    assert "(secret)" in await witness.cli("fleet", "run", "web1", "settings.get", "db.password")
    printed = await witness.cli("fleet", "run", "web1", "cmd.run", "cat", snapshot)
    assert "***" in printed


async def _failures(witness: Witness, tree: Path) -> None:
    """A tree that is wrong where the secret stands, and a box that was tampered with."""
    good = (tree / "db.yaml").read_text()
    for bad in (
        f"db: {{password: !encrypted '{CANARY}\n",
        f"db: {{password: !encrypt {CANARY}}}\n",
        f"db:\n  password: !encrypted {CANARY}\n  copy: {CANARY}\n",
    ):
        (tree / "db.yaml").write_text(bad)
        await witness.cli("settings", "push", "tree", code=1)
    (tree / "db.yaml").write_text(good.replace("db1", "db2"))
    await witness.cli("settings", "diff", "tree")
    async with witness.site.broker("operator") as broker:
        subject = kv_subject(broker.names.secrets, "web2")
        await broker.store(subject, b'{"boxes":{"db:db.password":{"1-x":{"1":"AAAA"}}}}')
    await witness.cli("settings", "push", "tree")
    await until(lambda: _all_on(witness, 2), 60, "both agents on revision 2")


def _browse(witness: Witness, url: str) -> None:
    """Every address of the API and of the pages that needs nothing to be filled in."""
    paths = json.loads(witness.get(f"{url}/api/v1/openapi.json"))["paths"]
    plain = [path for path, verbs in paths.items() if "get" in verbs and "{" not in path]
    assert len(plain) > 8
    for path in [*plain, "/", "/runs", "/dead", "/jobs", "/cluster", "/metrics"]:
        witness.get(url + path)
