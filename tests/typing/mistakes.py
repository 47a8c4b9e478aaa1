"""Mistakes that mypy and pyright must both catch: `test_typing.py` expects an error on each line
that ends in `# caught`, and on no other."""

from __future__ import annotations

from typing import Any

from sqlalchemy.orm import Session

from holdfast import Context, Flow, Holdfast, SyncApp, SyncContext
from holdfast.integrations import outbox

app = Holdfast("shop")


@app.job
async def resize(ctx: Context, id: int, width: int = 100) -> str:
    return ""


@app.job
def index(ctx: SyncContext, data: dict[str, Any]) -> int:
    return 0


@app.job
async def note(data: dict[str, Any], count: int = 0) -> None: ...


@app.job
async def clean() -> None: ...


@app.flow
async def restock(ctx: Flow, item: int) -> bool:
    return True


async def a_call_that_does_not_fit() -> None:
    await resize.enqueue("x")  # caught
    await resize.enqueue()  # caught
    await resize.enqueue(1, wdith=5)  # caught
    await resize.enqueue(1, key="x")  # caught
    await resize.options(key="x").enqueue("y")  # caught
    await resize.options(key="x").enqueue()  # caught
    await index.enqueue(1)  # caught
    await note.enqueue({}, count="x")  # caught
    await note.enqueue({}, cuont=1)  # caught
    await clean.enqueue(1)  # caught
    await restock.enqueue("x")  # caught
    await restock.options(kye="x").enqueue(7)  # caught
    resize.request("x")  # caught
    await resize.enqueue_many(["x"])  # caught
    await clean.enqueue_many([1])  # caught
    await resize(1)  # caught
    number: int = await (await resize.enqueue(1)).result()  # caught
    assert number


async def options_that_do_not_exist_or_fit() -> None:
    await resize.options(kye="x").enqueue(1)  # caught
    await resize.options(delay=None, at="tomorrow").enqueue(1)  # caught
    resize.schedule("s", cron="@daily", jiter="1m")  # caught
    resize.schedule("s", cron=5)  # caught
    resize.schedule("s", cron="@daily", payload="x")  # caught
    await resize.options(key="x", on_duplicate="ignore").enqueue(1)  # caught
    await resize.options(key=7).enqueue(1)  # caught
    app.once("x", tll="5m")  # caught
    app.job(tmeout="5m")  # caught
    app.job(timeout="5m", delivery="twice")  # caught
    app.cron("@daily", overlap="never")  # caught
    app.every("5m", catchup="last")  # caught


def through_the_outbox(session: Session) -> None:
    outbox.enqueue(session, resize, "x")  # caught
    outbox.enqueue(session, resize.options(key="x"))  # caught
    outbox.ordered("x").enqueue(session, clean, 1)  # caught


def from_plain_code(shop: SyncApp) -> None:
    shop.enqueue(resize, "x")  # caught
    shop.enqueue(resize)  # caught
    shop.enqueue(resize.options(key="x"), "y")  # caught
    shop.enqueue(clean, 1)  # caught
    shop.enqueue(note, {}, count="x")  # caught
    shop.enqueue(restock, "x")  # caught
    done: str = shop.enqueue(restock, 7).result()  # caught
    assert done
