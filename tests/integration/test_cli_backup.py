"""`holdfast backup` and `holdfast restore`: what they refuse, and what they keep."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast import Context, Holdfast
from holdfast.server import Cluster, Server
from tests.integration.command import Command
from tests.integration.support import working
from tests.support import until


async def command(server: Server | Cluster, namespace: str, folder: Path, *words: str) -> Command:
    """A command on a server, run to its end."""
    env = {"HOLDFAST_NATS_URL": server.url, "HOLDFAST_NAMESPACE": namespace}
    with Command(*words, folder=folder, cwd=folder, env=env) as started:
        await started.ended()
    return started


async def test_backup_of_a_cluster_is_restored_into_one_server(
    cluster: Cluster, namespace: str, tmp_path: Path
) -> None:
    """Streams of three copies become streams of one; results, waiting runs and epochs are kept."""
    app = Holdfast("kept", nats_url=cluster.url, namespace=namespace)
    seen: list[tuple[int, int]] = []

    @app.job
    async def work(number: int, ctx: Context) -> int:
        seen.append((number, ctx.epoch))
        return number

    async with app:
        async with working(app):
            done = await work.enqueue(1)
            assert await done.result(timeout=20) == 1
        waits = await work.enqueue(2)
        saved = await command(cluster, namespace, tmp_path, "backup", "saved")
        assert saved.process.returncode == 0, saved.text
    with Server(fast=True) as server:
        words = ("restore", "saved", "--epochs-above", "2000")
        restored = await command(server, namespace, tmp_path, *words)
        assert restored.process.returncode == 0, restored.text
        again = await command(server, namespace, tmp_path, *words)
        assert again.process.returncode == 1
        assert "nothing is overwritten" in again.text
        missing = await command(server, namespace, tmp_path, "restore", "saved", "--missing")
        assert "restored 0 streams" in missing.text
        app._overrides["nats_url"] = server.url
        async with app, working(app):
            backend = await app.backend()
            assert await backend.read(done.id) is not None
            await until(lambda: len(seen) == 2, 20, f"the run {waits.id}")
    assert [number for number, _ in seen] == [1, 2]
    assert seen[1][1] > 2000


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["backup", "full"], "is not empty: use a new folder for each backup"),
        (["restore", "full"], "holds no backup of the namespace"),
        (["restore", "absent"], "holds no backup of the namespace"),
        (["backup", "new"], "does not exist on this server"),
    ],
)
async def test_backup_says_what_is_wrong(
    nats: Server, namespace: str, tmp_path: Path, words: list[str], told: str
) -> None:
    """One sentence, and nothing is written."""
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    found = await command(nats, namespace, tmp_path, *words)
    assert found.process.returncode == 1
    assert told in found.text
    assert not (tmp_path / "new").exists()
