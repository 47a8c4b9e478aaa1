"""A web process: the app on a socket, with the lifecycle of every other role.

    bind ──► connect ──► serve ──► (signal, drain) close the streams ──► leave ──► exit

It refuses to listen where others can reach it unless it can authenticate users.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import uvicorn
from fastapi import FastAPI

from holdfast.app import Holdfast
from holdfast.config import ConnectionConfig, RecordConfig, WebConfig
from holdfast.errors import ConfigError
from holdfast.model.liveness import Liveness
from holdfast.role import Role
from holdfast.web.app import create_app
from holdfast.web.auth import Tokens
from holdfast.web.network import connection_class, is_loopback
from holdfast.web.proxy_login import ProxyLogin
from holdfast.web.services import Services

log = logging.getLogger("holdfast.web")

GRACE_SECONDS = 3  # for open requests at shutdown; streams are closed before
BACKLOG = 512  # connections that wait to be accepted: a burst of page loads


class WebServer(Role):
    """Serves the web app until it is stopped."""

    role = "web"

    def __init__(
        self,
        config: WebConfig,
        connection: ConnectionConfig,
        *,
        app: Holdfast | None = None,
        records: RecordConfig | None = None,
        liveness: Liveness | None = None,
        started: Callable[[str], None] | None = None,
        ready_file: str = "",
    ) -> None:
        """`started` is called with the address once it can be reached."""
        check_reachable(config)
        self._config = config
        self._on_started = started
        self.app: FastAPI = create_app(
            app,
            config=config,
            connection=connection,
            records=records,
            liveness=liveness,
            open_to_all=is_loopback(config.host),
            stop=self.stop,
        )
        self._services: Services = self.app.state.services
        broker, telemetry = self._services.broker, self._services.telemetry
        super().__init__(broker, telemetry, config, ready_file=ready_file)

    async def connect(self, ending: contextlib.AsyncExitStack) -> None:
        """Bind first, which may be refused; the services connect and join as a node."""
        self._listener = ending.enter_context(_bound(self._config))
        await ending.enter_async_context(self._services.lifespan())

    def tasks(self) -> dict[str, Coroutine[Any, Any, None]]:
        """Serve, and fail when the services cannot continue."""
        return {"web": self._serve(), "services": self._services_failed()}

    async def _serve(self) -> None:
        url = address(self._config, self._listener.getsockname()[1])
        log.info("serving on %s", url)
        if self._on_started:
            self._on_started(url)
        server = _Server(_uvicorn(self._config, self.app))
        serving = asyncio.create_task(server.serve([self._listener]), name="holdfast-uvicorn")
        try:
            await asyncio.shield(serving)
        finally:
            server.should_exit = True
            self._close_streams()
            await asyncio.gather(serving, return_exceptions=True)

    async def _services_failed(self) -> None:
        assert self._services.failed is not None  # they are open
        await asyncio.shield(self._services.failed)

    def _close_streams(self) -> None:
        """End the streams of open pages, which never end otherwise."""
        feed = getattr(self.app.state, "feed", None)
        if feed is not None:
            feed.close()

    def trouble(self) -> list[str]:
        """Problems that the services cannot repair."""
        return self._services.upkeep.problems

    def describe(self) -> dict[str, Any]:
        """Which node this is; a new one after it was declared lost."""
        return self._services.member.describe() if self._services.member else {}


class _Server(uvicorn.Server):
    """Uvicorn without signal handlers: the process handles signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _uvicorn(config: WebConfig, app: FastAPI) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        lifespan="off",  # the services outlive the last request
        access_log=False,
        log_config=None,
        log_level="error",  # anyone can send invalid HTTP: do not log each one
        http=connection_class(config),
        ws="none",
        server_header=False,
        proxy_headers=bool(config.proxies),
        forwarded_allow_ips=config.proxies or None,
        timeout_graceful_shutdown=GRACE_SECONDS,
        ssl_certfile=config.tls_cert or None,
        ssl_keyfile=config.tls_key or None,
    )


def check_reachable(config: WebConfig) -> None:
    """Refuse an address that others can reach, unless there are tokens or a login by proxy."""
    if not is_loopback(config.host) and not (Tokens(config) or ProxyLogin(config)):
        raise ConfigError(
            f"other machines can reach {config.host}, and everybody could do everything: make a "
            "token "
            "with 'holdfast web token NAME' and put its line into web.tokens "
            "(HOLDFAST_WEB_TOKENS), or listen on 127.0.0.1"
        )


@contextlib.contextmanager
def _bound(config: WebConfig) -> Iterator[socket.socket]:
    """The socket to listen on."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    with contextlib.closing(socket.socket(family, socket.SOCK_STREAM)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((config.host, config.port))
        except (OSError, UnicodeError) as error:
            why = getattr(error, "strerror", None) or str(error)
            raise ConfigError(
                f"cannot listen on {config.host}:{config.port} ({why}): choose another with "
                "--host and --port, or --port 0 for any that is free"
            ) from None
        listener.listen(BACKLOG)
        listener.setblocking(False)
        yield listener


def address(config: WebConfig, port: int) -> str:
    """Where to point a browser."""
    host = {"0.0.0.0": socket.gethostname(), "::": socket.gethostname()}.get(
        config.host, config.host
    )
    scheme = "https" if config.tls_cert else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}/"
