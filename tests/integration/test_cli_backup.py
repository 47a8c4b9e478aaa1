"""`holdfast backup` and `holdfast restore`: what they refuse, and what they keep."""

from __future__ import annotations

import asyncio
import time
import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from moto.server import ThreadedMotoServer

from holdfast import Context, Holdfast
from holdfast.client import Client
from holdfast.integrations.backups import NAME
from holdfast.integrations.objects import s3_store
from holdfast.server import Cluster, Server
from holdfast.status.figures import lags
from tests.integration.command import Command
from tests.integration.support import client_of, working
from tests.support import until


async def command(
    server: Server | Cluster, namespace: str, folder: Path, *words: str, **more: str
) -> Command:
    """A command on a server, run to its end."""
    env = {"HOLDFAST_NATS_URL": server.url, "HOLDFAST_NAMESPACE": namespace, **more}
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
    async def work(ctx: Context, number: int) -> int:
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


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """An S3 server."""
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    yield "http://{}:{}".format(*server.get_host_and_port())
    server.stop()


async def test_backups_in_an_object_store_are_kept_rehearsed_and_restored(
    nats: Server, namespace: str, s3: str, tmp_path: Path
) -> None:
    """Each has its own name; an unfinished one is not restored; old ones go; damage is found."""
    store = s3_store("kept", s3, "key", "secret", region="us-east-1")
    with urllib.request.urlopen(urllib.request.Request(f"{s3}/kept", method="PUT")) as made:
        assert made.status == 200
    env = {"OBJECTS_KEY": "key", "OBJECTS_SECRET": "secret"}
    place = f"s3://kept/acme?endpoint={s3}&region=us-east-1"
    app = Holdfast("kept", nats_url=nats.url, namespace=namespace)

    @app.job
    async def work(number: int) -> int:
        return number

    def names() -> list[str]:
        found = [str(one["path"]) for page in store.list("acme") for one in page]
        return sorted({path.split("/")[1] for path in found})

    async def run(server: Server, *words: str) -> Command:
        return await command(server, namespace, tmp_path, *words, **env)

    async with app:
        for number in range(3):
            await work.enqueue(number)
            saved = await run(nats, "backup", place, "--keep", "2")
            assert saved.process.returncode == 0, saved.text
            await asyncio.to_thread(passed, names()[-1])
    assert len(names()) == 2
    drilled = await run(nats, "restore", "--drill", place)
    assert drilled.process.returncode == 0, drilled.text
    assert f"messages: {names()[-1]}" in drilled.text
    store.put(f"acme/99991231T000000Z/{namespace.upper()}_JOBS/backup.json", b"{}")  # unfinished
    with Server(fast=True) as server:
        words = ("restore", place.replace("acme", f"acme/{names()[0]}"))
        restored = await run(server, *words)
        assert f"messages: {names()[0]}" in restored.text, restored.text
        app._overrides["nats_url"] = server.url
        async with app, working(app):
            backend = await client_of(app)
            await until(lambda: nothing_waits(backend), 20, "both runs of the older backup")
    data = f"acme/{names()[1]}/{namespace.upper()}_JOBS/stream.tar.s2"
    whole = bytes(store.get(data).bytes())
    store.put(data, whole[: len(whole) // 2])
    broken = await run(nats, "restore", "--drill", place)
    assert broken.process.returncode == 1, broken.text
    absent = await run(nats, "restore", place.replace("acme", "elsewhere"))
    assert "has no complete backup" in absent.text
    unknown = await run(nats, "backup", "ftp://kept")
    assert "must be a folder, or s3://" in unknown.text


def passed(name: str) -> None:
    """Wait until another backup would have another name."""
    while datetime.now(UTC).strftime(NAME) == name:
        time.sleep(0.05)


async def nothing_waits(client: Client) -> bool:
    """Whether every run in the queue was worked."""
    found = await lags(client)
    return bool(found) and sum(one.lag for one in found) == 0


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
