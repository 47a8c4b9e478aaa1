"""One nats-server with JetStream, from its configuration to its end."""

from __future__ import annotations

import atexit
import http.client
import json
import os
import re
import signal
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from holdfast.server.process import (
    HOST,
    PortInUse,
    Process,
    ServerError,
    free_ports,
    temporary_store,
)

MAX_PAYLOAD = 1024 * 1024
"""The official server's default."""
READY_SECONDS = 20.0
"""Timeout of a start, which takes a tenth of a second, or five seconds if a cluster waits out an
election."""
STOP_SECONDS = 10.0
"""Timeout of an orderly shutdown, which writes its state; then it is killed."""
RELOAD_SECONDS = 10.0
"""Timeout of a reload: many times what it takes, for machines under load."""
ATTEMPTS = 5  # attempts to start if other programs take the port that we chose

ROOMY = "1PB"
"""Storage of a fast server. It is for tests, and each of their many namespaces reserves some."""
_PACE_SECONDS = 0.005
"""Pause between two checks: short compared to a start, which tests wait for often."""
_LOG_LINES = 12
"""Log lines shown in an error: the reason for a failed start is among the last few."""
_RELOADED = "Reloaded server configuration"
_NOT_RELOADED = "Failed to reload server configuration"
_IN_USE = re.compile(r"listen tcp \S*:(\d+): bind: address already in use")


class Server:
    """One nats-server with JetStream. Constructing it does nothing; use `with`, or `start`."""

    def __init__(
        self,
        port: int = 0,
        store: Path | None = None,
        *,
        fast: bool = False,
        name: str = "holdfast",
        monitor_port: int | None = 0,
        max_payload: int = MAX_PAYLOAD,
        extra_config: str = "",
        includes: Sequence[Path] = (),
    ) -> None:
        """Port 0 means a free port, chosen at the first start and kept; no monitor with None.

        Without a store, a temporary one is made at start and removed by `close`. `includes` are
        further files of configuration, read again by `reload`.
        """
        self.name = name
        self.fast = fast
        self.max_payload = max_payload
        self.extra_config = extra_config
        self.includes = tuple(includes)
        self._wanted = (port, monitor_port)
        self._ports = (port, monitor_port)
        self._settled = False  # was ready once: from now on the ports are fixed
        self._cluster_config = ""  # see join
        self._store = store
        self._own_store: tempfile.TemporaryDirectory[str] | None = None
        self._process: Process | None = None

    def __repr__(self) -> str:
        state = f"pid {self.pid}" if self.running else "not running"
        return f"<Server {self.name} on port {self._ports[0]}, {state}>"

    # ------------------------------------------------------------ what it is

    @property
    def port(self) -> int:
        """The port that clients connect to."""
        if not self._ports[0]:
            raise ServerError("the port is not chosen yet: start the server first")
        return self._ports[0]

    @property
    def url(self) -> str:
        """The address that clients connect to."""
        return f"nats://{HOST}:{self.port}"

    @property
    def monitor_url(self) -> str:
        """The address of its monitoring pages."""
        if not self._ports[1]:
            raise ServerError("the server has no monitor port, or was not started yet")
        return f"http://{HOST}:{self._ports[1]}"

    @property
    def store(self) -> Path:
        """Where its streams are kept."""
        if self._store is None:
            raise ServerError("the temporary store is made at start: start the server first")
        return self._store

    @property
    def log_path(self) -> Path:
        """Where its log is."""
        return self.store / "nats-server.log"

    @property
    def running(self) -> bool:
        """Whether its process is alive."""
        return self._process is not None and not self._process.exited.is_set()

    @property
    def failed(self) -> bool:
        """Whether it ended by itself before it was ready."""
        process = self._process
        return process is not None and process.exited.is_set() and not process.ready

    @property
    def pid(self) -> int:
        """The id of its process."""
        if self._process is None or not self.running:
            raise ServerError(f"the nats-server {self.name!r} is not running")
        return self._process.pid

    def wants(self, port: int) -> bool:
        """Whether this port was asked for, so that no other will do."""
        return port in self._wanted

    # ------------------------------------------------------------ what it does

    def join(self, cluster: str, listen: str, routes: Sequence[str], options: str = "") -> None:
        """Make it a member of a cluster at its next start; addresses are `host:port`.

        `options` are further lines for the cluster's block of the configuration.
        """
        urls = ", ".join(f'"nats://{route}"' for route in routes)
        self._cluster_config = (
            f'cluster {{ name: {_quoted(cluster)}, listen: "{listen}", routes: [{urls}]\n'
            f"{options}\n}}"
        )

    def start(self) -> None:
        """Spawn the process and return at once; `wait_ready` reports the result."""
        if self.running:
            raise ServerError(f"the nats-server {self.name!r} is already running: stop it first")
        if self._store is None:
            self._own_store = temporary_store()
            self._store = Path(self._own_store.name)
        if not self._settled:
            self._choose_ports()
        self._spawn()

    def wait_ready(self, timeout: float = READY_SECONDS) -> None:
        """Return once clients can connect and JetStream is healthy.

        Ports that we chose ourselves may change until this has returned once.
        """
        deadline = time.monotonic() + timeout
        attempt = 1
        while not self._ready():
            lost = self._lost_port()
            if lost is not None:
                if attempt == ATTEMPTS or not self._may_move(lost):
                    raise PortInUse(lost)
                attempt += 1
                self._choose_ports()
                self._spawn()
            elif time.monotonic() >= deadline:
                message = f"the nats-server {self.name!r} was not ready in {timeout:.3g} s"
                raise ServerError(f"{message}; its log ends with:\n{self.log_tail()}")
        self._settled = True

    def reload(self) -> None:
        """Reload the configuration; returns when users that it no longer has are disconnected."""
        before = self._reloads()
        os.kill(self.pid, signal.SIGHUP)
        deadline = time.monotonic() + RELOAD_SECONDS
        while (found := self._reloads()) == before:
            if time.monotonic() > deadline or not self.running:
                raise ServerError(f"the nats-server {self.name!r} did not reload")
            time.sleep(_PACE_SECONDS)
        if found[1] != before[1]:
            raise ServerError(
                f"the nats-server {self.name!r} keeps its old configuration, because it cannot use "
                f"the new one; its log ends with:\n{self.log_tail()}"
            )

    def _reloads(self) -> tuple[int, int]:
        """How often it has loaded a new configuration, and refused one."""
        text = self.log_path.read_text(encoding="utf-8", errors="replace")
        return text.count(_RELOADED), text.count(_NOT_RELOADED)

    def wait_ended(self) -> None:
        """Return when the process has ended, for whatever reason."""
        if self._process is not None:
            self._process.exited.wait()

    def terminate(self) -> None:
        """Ask it to shut down and return at once; `stop` waits for the end."""
        if self._process is not None:
            self._process.terminate()

    def stop(self, timeout: float = STOP_SECONDS) -> None:
        """Shut down (SIGTERM), or kill it if that takes too long."""
        if self._process is not None:
            self._process.terminate()
            if not self._process.exited.wait(timeout):
                self._process.kill()
        self._forget()

    def kill(self) -> None:
        """End the process as a crash would (SIGKILL); returns when it is gone."""
        if self._process is not None:
            self._process.kill()
        self._forget()

    def restart(self, timeout: float = READY_SECONDS) -> None:
        """Bring it back, ready, on the same port and store; stops it first if it runs."""
        self.stop()
        self.start()
        self.wait_ready(timeout)

    def close(self) -> None:
        """Stop, and remove the store if it is a temporary one of ours."""
        self.stop()
        if self._own_store is not None:
            self._own_store.cleanup()
            self._own_store = self._store = None

    def monitor(self, path: str, timeout: float = 2.0) -> dict[str, Any]:
        """The JSON that the monitor answers, for example to `/jsz?config=true`."""
        host = self.monitor_url.removeprefix("http://")
        connection = http.client.HTTPConnection(host, timeout=timeout)
        try:
            connection.request("GET", path)
            answer = json.loads(connection.getresponse().read())
        except (OSError, http.client.HTTPException, ValueError) as error:
            message = f"the monitor of {self.name!r} did not answer {path}: {error!r}"
            raise ServerError(message) from error
        finally:
            connection.close()
        return dict(answer)

    def log_tail(self) -> str:
        """The last lines that the process wrote."""
        written = self._process.log_start if self._process else 0
        with self.log_path.open("rb") as log:
            log.seek(written)
            lines = log.read().decode(errors="replace").splitlines()
        return "\n".join(lines[-_LOG_LINES:]) or "(nothing was logged)"

    def __enter__(self) -> Self:
        try:
            self.start()
            self.wait_ready()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # ------------------------------------------------------------ how

    def _choose_ports(self) -> None:
        port, monitor = self._wanted
        free = free_ports(2)
        self._ports = (port or free[0], free[1] if monitor == 0 else monitor)

    def _spawn(self) -> None:
        self.store.mkdir(parents=True, exist_ok=True)
        self._process = Process(self._config(), self.store, self.log_path)
        atexit.register(self.kill)

    def _forget(self) -> None:
        self._process = None
        atexit.unregister(self.kill)

    def _config(self) -> str:
        port, monitor = self._ports
        lines = [
            f"server_name: {_quoted(self.name)}",
            f'listen: "{HOST}:{port}"',
            f'http: "{HOST}:{monitor}"' if monitor else "",
            f"max_payload: {self.max_payload}",
            f"ports_file_dir: {_quoted(str(self.store))}",
            f"jetstream {{ store_dir: {_quoted(str(self.store))}"
            + (f", max_file_store: {ROOMY}" if self.fast else ", sync_interval: always")
            + " }",
            self._cluster_config,
            self.extra_config,
            *(f"include {_quoted(os.path.relpath(path, self.store))}" for path in self.includes),
        ]
        return "\n".join(filter(None, lines)) + "\n"

    def _ready(self) -> bool:
        process = self._process
        if process is None:
            raise ServerError(f"the nats-server {self.name!r} is not started: start it first")
        if process.exited.wait(0 if process.ready else _PACE_SECONDS):
            return False
        process.ready = any(self.store.glob(f"*_{process.pid}.ports")) and self._healthy()
        return process.ready

    def _healthy(self) -> bool:
        if self._cluster_config or self._ports[1] is None:
            return True  # the health of a cluster needs a majority: Cluster asks for it
        try:
            return self.monitor("/healthz").get("status") == "ok"
        except ServerError:
            return False

    def _lost_port(self) -> int | None:
        """The port that was in use, or None while it runs; raises if it died for another reason."""
        if self.running:
            return None
        tail = self.log_tail()
        if match := _IN_USE.search(tail):
            return int(match[1])
        raise ServerError(f"the nats-server {self.name!r} ended; its log ends with:\n{tail}")

    def _may_move(self, port: int) -> bool:
        chosen = port in self._ports and not self.wants(port)
        return chosen and not self._settled and not self._cluster_config


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
