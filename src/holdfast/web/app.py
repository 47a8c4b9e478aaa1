"""`create_app`: the API and the pages as one ASGI app.

Run by `holdfast web`, or mounted into a user's own FastAPI app with `mount`. It needs to know who
is asking: by tokens, by the `authenticate` of the app around it, or by `open_to_all`, for a process
that only its own machine can reach. Without one of them it is refused, because everybody could do
everything.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

from fastapi import FastAPI

from holdfast.app import Holdfast
from holdfast.config import ConnectionConfig, RecordConfig, WebConfig, load
from holdfast.errors import ConfigError
from holdfast.model.liveness import Liveness
from holdfast.version import __version__
from holdfast.web import api, login, pages, probes
from holdfast.web.auth import Authenticate
from holdfast.web.live import Feed
from holdfast.web.problems import handle_problems
from holdfast.web.security import Guard
from holdfast.web.services import Services


def create_app(
    app: Holdfast | None = None,
    *,
    config: WebConfig | None = None,
    connection: ConnectionConfig | None = None,
    records: RecordConfig | None = None,
    liveness: Liveness | None = None,
    authenticate: Authenticate | None = None,
    open_to_all: bool = False,
    with_pages: bool = True,
    stop: Callable[[], None] | None = None,
) -> FastAPI:
    """The web app; what is not given comes from the environment and `holdfast.toml`.

    `with_pages=False` leaves only the API.
    """
    if connection is None:
        connection = app.connection_config() if app else load(ConnectionConfig)
    services = Services(
        config or load(WebConfig),
        connection,
        records=records or load(RecordConfig),
        liveness=liveness,
        app=app,
        authenticate=authenticate,
        stop=stop,
    )
    if not (services.tokens or authenticate or open_to_all):
        raise ConfigError(
            "the web app would let everybody do everything: configure web.tokens (see 'holdfast "
            "web token'), or pass authenticate=, or open_to_all=True if only you can reach it"
        )
    web = FastAPI(
        title="Holdfast",
        version=__version__,
        description="Runs, jobs, schedules, dead letters, nodes and the fleet of one namespace.",
        lifespan=services.lifespan,
        openapi_url="/api/v1/openapi.json",
        docs_url=None,  # they load scripts from elsewhere
        redoc_url=None,
    )
    web.state.services = services
    web.state.with_pages = with_pages
    handle_problems(web)
    api.include(web)
    probes.include(web)
    if with_pages:
        login.include(web)
        pages.include(web)
    else:
        web.state.feed = Feed(services.client)
        services.before_close.append(web.state.feed.aclose)
    web.add_middleware(Guard, services=services)
    return web


def mount(parent: FastAPI, path: str, web: FastAPI) -> None:
    """Put the web app under a path of another one, and connect it while that one runs."""
    before = parent.router.lifespan_context
    services: Services = web.state.services

    @contextlib.asynccontextmanager
    async def both(app: Any) -> AsyncIterator[Any]:
        async with before(app) as state, services.lifespan():
            yield state

    parent.router.lifespan_context = both
    parent.mount(path, web)
