"""`holdfast server`: a real nats-server in the foreground, one node or a small cluster.

The main thread waits on one queue; the signal handler puts signals there, and a thread per node
puts a node that ended. Nothing is polled, and the first event decides.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli import out
from holdfast.cli.command import command
from holdfast.cli.options import option
from holdfast.process import SAME_SECONDS

if TYPE_CHECKING:
    from holdfast.identity.takers import Taker
    from holdfast.server import Cluster, Server

    Events = queue.SimpleQueue[int | Server]

STORE = Path("holdfast-data")
DEV_STORE = Path(".holdfast") / "dev"
"""Where `holdfast dev` keeps its data."""
PORT = 4222
"""The NATS convention for clients."""
MONITOR_OFFSET = 4000
"""What to add to a client port for its monitor port: 4222 and 8222, the NATS convention."""
LAST_PORT = 65_535
SIZES = (1, 3, 5)
"""An even number of servers survives no more failures than the odd number below it."""
LOOK_SECONDS = 0.5  # how late a server that died is noticed
RELOADS = 2
"""A reload that moves users to another account connects its imports only at the next one
(nats-server 2.15.1)."""

DURABLE = "every acknowledged write survives a power cut (sync_interval: always)"
FAST = "acknowledged writes survive a crash of the server, not a power cut (--fast)"


@command("server")
def server(
    port: Annotated[
        int,
        option(
            "Port for clients; a cluster also takes the next ones. 0 means any free ports.",
            min=0,
            max=LAST_PORT,
        ),
    ] = PORT,
    store: Annotated[
        Path, option("Directory that keeps the data.", "DIR", file_okay=False)
    ] = STORE,
    cluster: Annotated[int, option("Nodes: 1, 3 or 5.", "N")] = 1,
    fast: Annotated[bool, option("Do not wait for the disk: a power cut loses data.")] = False,
    monitor_port: Annotated[
        int | None,
        option(
            "Monitoring port, for doctor; 0: a free one; default: port + 4000.",
            min=0,
            max=LAST_PORT,
        ),
    ] = None,
    auth: Annotated[
        Path | None,
        option(
            "Folder of 'holdfast auth init': only its users may log in.",
            "DIR",
            file_okay=False,
        ),
    ] = None,
) -> None:
    """Run a nats-server on this machine until Ctrl-C.

    It listens on loopback only, for development, tests and small machines, and asks for no login
    unless --auth, where added and revoked users take effect within a second. What it acknowledged
    survives a power cut unless --fast. Exit codes: 0 when it was stopped, 1 when it
    could not start or ended by itself.
    """
    from holdfast.identity.takers import Taker, digest

    if cluster not in SIZES:
        raise typer.BadParameter("1, 3 or 5: an even number of nodes adds no safety")
    events: Events = queue.SimpleQueue()
    handle_signals(events)
    monitor = monitor_port_of(port, cluster) if monitor_port is None else monitor_port
    included = [_users_config(auth)] if auth else []
    begun = [digest(path) for path in included]
    with _make(port, monitor, store.resolve(), cluster, fast, included) as made:
        nodes = getattr(made, "nodes", None) or [made]
        _tell(made, nodes, store.resolve(), fast)
        for node in nodes:
            threading.Thread(target=_watch, args=(node, events), daemon=True).start()
        takers = [Taker(path, made.url) for path in included]
        for path, seen, taker in zip(included, begun, takers, strict=True):
            _record(taker, seen)
            changes = (path, seen, nodes, taker)
            threading.Thread(target=_reload_on_change, args=changes, daemon=True).start()
        code = _until_end(nodes, events)
        for taker in takers:
            taker.close()
    raise typer.Exit(code)


def handle_signals(events: Events) -> None:
    """The first SIGTERM or SIGINT becomes an event; a second one, later, exits at once."""
    first: list[float] = []

    def received(number: int, _: FrameType | None) -> None:
        if not first:
            first.append(time.monotonic())
            events.put(number)
        elif time.monotonic() - first[0] > SAME_SECONDS:
            os._exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, received)


def monitor_port_of(port: int, nodes: int) -> int:
    """The conventional monitor port, or any free one if it is taken."""
    found = port + MONITOR_OFFSET
    return found if port and all(_is_free(found + n) for n in range(nodes)) else 0


def _is_free(port: int) -> bool:
    from holdfast.server.process import HOST

    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((HOST, port))
        except (OSError, OverflowError):
            return False
    return True


def _users_config(folder: Path) -> Path:
    from holdfast.identity.users import UserFolder

    found = UserFolder(folder.resolve())
    found.users()  # raises with advice when there are none
    return found.config


def _reload_on_change(path: Path, seen: str, nodes: Sequence[Server], taker: Taker) -> None:
    """Watch a file that is replaced atomically, and make the servers reload it."""
    from holdfast.identity.takers import digest
    from holdfast.server import ServerError

    while True:
        time.sleep(LOOK_SECONDS)
        try:
            if (now := digest(path)) == seen:
                continue
            seen = now
            for _ in range(RELOADS):
                for node in nodes:
                    if node.running:
                        node.reload()
            out.note(f"the users in {path} have changed: reloaded")
            _record(taker, seen)
        except (OSError, ServerError) as error:
            out.note(f"error: the users in {path} have changed and could not be reloaded: {error}")
            _record(taker, seen, str(error).split("\n", 1)[0])


def _record(taker: Taker, seen: str, error: str = "") -> None:
    """Record what was loaded, for 'holdfast auth'."""
    try:
        taker.write(seen, error)
    except OSError as problem:
        out.note(f"'holdfast auth revoke' cannot see what this server has loaded: {problem}")


def _make(
    port: int, monitor: int, store: Path, nodes: int, fast: bool, includes: Sequence[Path]
) -> Server | Cluster:
    from holdfast.server import Cluster, Server

    if nodes == 1:
        return Server(port, store, fast=fast, monitor_port=monitor, includes=includes)
    ports = [port + n if port else 0 for n in range(nodes)]
    monitors = [monitor + n if monitor else 0 for n in range(nodes)]
    return Cluster(nodes, store, fast=fast, ports=ports, monitor_ports=monitors, includes=includes)


def _tell(made: Server | Cluster, nodes: Sequence[Server], store: Path, fast: bool) -> None:
    facts = {
        "url": made.url,
        "store": str(store),
        "durability": FAST if fast else DURABLE,
        "monitor": ",".join(node.monitor_url for node in nodes),
    }
    if not out.as_json(facts):
        out.say(
            "nats-server is ready" if len(nodes) == 1 else f"{len(nodes)} nats-servers are ready"
        )
        out.pairs((f"  {name}", value) for name, value in facts.items())
        if store == STORE.resolve() and DEV_STORE.exists():
            out.say(
                f"'holdfast dev' keeps its data in {DEV_STORE}: pass --store {DEV_STORE} to serve "
                "it"
            )
        out.say("Ctrl-C stops it; the data stays.")


def _watch(node: Server, events: Events) -> None:
    node.wait_ended()
    events.put(node)


def _until_end(nodes: Sequence[Server], events: Events) -> int:
    """Wait for a signal, or until the nodes lose their majority."""
    while True:
        event = events.get()
        if isinstance(event, int):
            out.note("stopping")
            return 0
        out.note(
            f"nats-server {event.name!r} ended by itself; its log ends with:\n{event.log_tail()}",
            lines=True,
        )
        running = sum(node.running for node in nodes)
        if running <= len(nodes) // 2:
            out.note("error: no server is left" if not running else "error: no majority is left")
            return 1
