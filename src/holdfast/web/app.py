"""`create_app`: the API and the pages as one ASGI app; `Queue`: send runs from your own routes.

`holdfast web` runs the app; `mount` puts it into another FastAPI app. It needs a way to
authenticate users: tokens, the host app's `authenticate`, or `open_to_all` for a process that only
its own machine can reach. Without one it refuses to start, because anyone could do anything.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
from fastapi import APIRouter, FastAPI, Request
from starlette.responses import Response

from holdfast.app import Holdfast
from holdfast.config import ConnectionConfig, RecordConfig, WebConfig, load
from holdfast.errors import ConfigError
from holdfast.model.liveness import Liveness
from holdfast.version import __version__
from holdfast.web import api, pages, security
from holdfast.web.auth import Authenticate
from holdfast.web.live import Feed
from holdfast.web.problems import handle_problems
from holdfast.web.services import Services, services_of


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
    """The web app; options not given come from the environment and `holdfast.toml`.

    `with_pages=False` serves only the API.
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
    if not (services.tokens or services.proxy_login or authenticate or open_to_all):
        raise ConfigError(
            "the web app would let anybody do anything: configure web.tokens (see 'holdfast web "
            "token'), or pass authenticate=, or open_to_all=True if only you can reach it"
        )
    web = FastAPI(
        title="Holdfast",
        version=__version__,
        description="Runs, jobs, schedules, dead letters, nodes and the fleet of one namespace.",
        lifespan=services.lifespan,
        openapi_url="/api/v1/openapi.json",
        docs_url=None,  # it loads scripts from other sites
        redoc_url=None,
    )
    web.state.services = services
    web.state.with_pages = with_pages
    web.state.feed = Feed(services.client)
    services.before_close.append(web.state.feed.aclose)
    handle_problems(web)
    api.include(web)
    web.include_router(probes)
    if with_pages:
        security.include(web)
        pages.include(web)
    web.add_middleware(security.Guard, services=services)
    return web


def mount(parent: FastAPI, path: str, web: FastAPI) -> None:
    """Mount the web app under a path of another app, and keep it connected while that one runs."""
    before = parent.router.lifespan_context
    services: Services = web.state.services

    @contextlib.asynccontextmanager
    async def both(app: Any) -> AsyncIterator[Any]:
        async with before(app) as state, services.lifespan():
            yield state

    parent.router.lifespan_context = both
    parent.mount(path, web)


# ---- probes, open to all

probes = APIRouter(include_in_schema=False)


@probes.get("/health/live")
async def live() -> dict[str, Any]:
    """The event loop answers."""
    return {"live": True}


@probes.get("/health/ready")
async def ready(request: Request) -> Response:
    """NATS is connected."""
    connected = services_of(request).broker.connected
    problems = [] if connected else ["not connected to NATS"]
    body = msgspec.json.encode({"ready": connected, "problems": problems})
    return Response(body, 200 if connected else 503, media_type="application/json")


# ---- runs from a user's own routes


class Queue:
    """A FastAPI dependency that gives routes a connected Holdfast app to send runs with.

        queue = Queue(shop)
        api = FastAPI(lifespan=queue.lifespan)

        @api.post("/images")
        async def add(image: Image, jobs: Annotated[Holdfast, Depends(queue)]) -> str:
            return (await jobs.enqueue("resize", image)).id

    Without the lifespan it connects when the first run is sent, and never disconnects.
    """

    def __init__(self, app: Holdfast) -> None:
        self.app = app

    async def __call__(self) -> Holdfast:
        await self.app.backend()
        return self.app

    @contextlib.asynccontextmanager
    async def lifespan(self, _: Any = None) -> AsyncIterator[None]:
        """Connected while the web app runs."""
        async with self.app:
            yield
