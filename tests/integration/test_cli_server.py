"""`holdfast server` as a process: what it prints, how it ends, what it keeps."""

from __future__ import annotations

import json
import os
import signal
import socket
from contextlib import closing
from pathlib import Path

import pytest

from holdfast import Holdfast
from tests.integration.command import Command, free_port, gone, watched


async def told(server: Command, words: str = "Ctrl-C") -> dict[str, str]:
    """The facts that it prints when it is ready."""
    text = await server.says(words)
    return dict(line.split(None, 1) for line in text.splitlines() if line.startswith("  "))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_server_keeps_what_it_acknowledged(tmp_path: Path, number: signal.Signals) -> None:
    """It says where it and its data are, ends well on a signal, and comes back with both."""
    store, port = tmp_path / "data", str(free_port())
    arguments = ("server", "--port", port, "--store", str(store))
    with Command(*arguments, folder=tmp_path) as server:
        facts = await told(server)
        assert facts["url"] == f"nats://127.0.0.1:{port}"
        assert facts["store"] == str(store)
        assert "sync_interval: always" in facts["durability"]
        async with Holdfast("shop", nats_url=facts["url"]) as app:
            run = await _send(app)
        server.signal(number)
        assert await server.ended() == 0
    with Command(*arguments, folder=tmp_path) as server:
        await told(server)
        async with Holdfast("shop", nats_url=facts["url"]) as app:
            assert await _send(app) == run + " again"


async def _send(app: Holdfast) -> str:
    @app.job
    async def nothing() -> None: ...

    run = await nothing.options(key="once").enqueue()
    return run.id + (" again" if run.duplicate else "")


async def test_server_keeps_its_data_in_the_working_directory_unless_told(tmp_path: Path) -> None:
    """The default store is durable and visible, and it is said where it is."""
    with Command("server", "--port", "0", "--json", folder=tmp_path, cwd=tmp_path) as server:
        facts = json.loads(await server.says("}"))
        assert facts["store"] == str(tmp_path / "holdfast-data")
        assert (tmp_path / "holdfast-data" / "jetstream").is_dir()
        server.signal(signal.SIGTERM)
        assert await server.ended() == 0


async def test_server_refuses_a_port_in_use_in_one_sentence(tmp_path: Path) -> None:
    """No traceback and no log, but which port and what to do."""
    with closing(socket.socket()) as other:
        other.bind(("127.0.0.1", 0))
        other.listen(1)
        port = other.getsockname()[1]
        arguments = ("server", "--port", str(port), "--store", str(tmp_path / "data"))
        with Command(*arguments, folder=tmp_path) as server:
            assert await server.ended() == 1
    assert server.text.startswith(f"error: port {port} on 127.0.0.1 is in use")
    assert len(server.text.splitlines()) == 1


async def test_server_that_dies_is_told_with_its_last_words(tmp_path: Path) -> None:
    """When the nats-server ends by itself the command ends too: exit code 1, and its log."""
    arguments = ("server", "--port", "0", "--store", str(tmp_path / "data"))
    with Command(*arguments, folder=tmp_path) as server:
        await told(server)
        (child,) = await server.children()
        os.kill(child, signal.SIGKILL)
        assert await server.ended() == 1
    assert "ended by itself" in server.text
    assert "Server is ready" in server.text


async def test_server_runs_a_cluster(tmp_path: Path) -> None:
    """Three nodes: a worker's streams get three copies; losing one node is told and survived."""
    arguments = ("server", "--port", "0", "--cluster", "3", "--store", str(tmp_path / "data"))
    with Command(*arguments, "--fast", folder=tmp_path) as server:
        facts = await told(server)
        assert facts["url"].count("nats://") == 3
        assert "not a power cut" in facts["durability"]
        nodes = await server.children()
        assert len(nodes) == 3
        os.kill(nodes[0], signal.SIGKILL)
        await server.says("ended by itself")
        with watched(*nodes[1:]) as others:
            server.signal(signal.SIGINT)
            assert await server.ended() == 0
            await gone(others)


async def test_server_refuses_a_cluster_of_two(tmp_path: Path) -> None:
    """An even number of nodes adds no safety."""
    with Command("server", "--cluster", "2", folder=tmp_path) as server:
        assert await server.ended() == 2
    assert "adds no safety" in server.text
