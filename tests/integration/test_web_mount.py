"""The web inside a user's own FastAPI app, and runs sent from its routes.

Annotations are evaluated here, as FastAPI needs it of routes inside a function.
"""

from typing import Annotated

import httpx
from fastapi import Depends, FastAPI, Request

from holdfast import Holdfast
from holdfast.config import ConnectionConfig, WebConfig
from holdfast.server import Server
from holdfast.testing import RunningWorker
from holdfast.web import Queue, User, create_app, mount
from tests.integration.web_support import HOST, shop


def asking(app: FastAPI) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=HOST)


async def known(request: Request) -> User | None:
    """Who the app around it says is asking."""
    name = request.headers.get("x-user")
    return User(name, "operator", "app") if name else None


async def test_mounted_app_works_under_its_path(nats: Server, namespace: str) -> None:
    """API and pages work under the path, the parent's routes beside it; the parent knows users."""
    parent = FastAPI()

    @parent.get("/hello")
    async def hello() -> str:
        return "hello"

    connection = ConnectionConfig(nats_url=nats.url, namespace=namespace)
    web = create_app(config=WebConfig(), connection=connection, authenticate=known)
    mount(parent, "/ops", web)
    async with parent.router.lifespan_context(parent), asking(parent) as client:
        assert (await client.get("/hello")).json() == "hello"
        assert (await client.get("/ops/api/v1/runs")).status_code == 401
        headers = {"x-user": "ann", "accept": "text/html"}
        sent = await client.post("/ops/api/v1/runs", json={"job": "add"}, headers=headers)
        assert sent.status_code == 201
        assert (await client.post("/ops/api/v1/dead/drop", json={}, headers=headers)).is_error
        page = await client.get("/ops/runs", headers=headers)
        assert page.status_code == 200
        assert sent.json()["run"] in page.text
        assert 'href="/ops/jobs"' in page.text
        assert "Path=/ops" in page.headers["set-cookie"]
        told = (await client.get("/ops/api/v1/audit", headers=headers)).json()["items"]
        assert [(a["verb"], a["who"]) for a in told] == [("enqueue", "ann")]


async def test_mounted_app_without_a_lifespan_connects_by_itself(
    nats: Server, namespace: str
) -> None:
    """A parent that runs no lifespan of ours: the first request connects."""
    connection = ConnectionConfig(nats_url=nats.url, namespace=namespace)
    web = create_app(config=WebConfig(), connection=connection, open_to_all=True)
    parent = FastAPI()
    parent.mount("/ops", web)
    async with asking(parent) as client:
        assert (await client.get("/ops/api/v1/runs")).status_code == 200
    await web.state.services.close()


async def test_queue_gives_routes_an_app_that_sends(nats: Server, namespace: str) -> None:
    """A dependency sends runs from a user's route, over one connection for all requests."""
    jobs = shop()
    jobs._overrides.update(nats_url=nats.url, namespace=namespace)
    queue = Queue(jobs)
    api = FastAPI(lifespan=queue.lifespan)

    @api.post("/sums")
    async def add(a: int, b: int, shop: Annotated[Holdfast, Depends(queue)]) -> int:
        run = await shop.enqueue("add", a=a, b=b)
        found: int = await run.result(timeout=30)
        return found

    async with (
        RunningWorker(jobs, nats_url=nats.url, namespace=namespace),
        api.router.lifespan_context(api),
        asking(api) as client,
    ):
        answers = [(await client.post(f"/sums?a={n}&b=1")).json() for n in range(3)]
        assert answers == [1, 2, 3]
