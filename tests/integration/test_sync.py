"""The synchronous client, as from Django and Flask: threads, forks, and the process's end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from holdfast import Context, Holdfast, SyncApp, SyncContext
from holdfast.errors import (
    HoldfastError,
    InvalidPayload,
    NotConnected,
    OutcomeUnknown,
    ResultTimeout,
    RunCancelled,
    RunFailed,
    UnknownJob,
)
from holdfast.server import Server
from holdfast.testing import RunningWorker, eager


@pytest.fixture
def shop(app: Holdfast, nats: Server, namespace: str) -> Iterator[SyncApp]:
    """The app's jobs on a worker in another thread, and the client under test."""

    @app.job
    async def add(a: int, b: int) -> int:
        return a + b

    @app.job
    async def wait_long() -> None:
        await asyncio.sleep(60)

    @app.job
    def talk(ctx: SyncContext, name: str) -> None:
        ctx.logger.info("hello %s", name)

    @app.job(on="added")
    def note(ctx: SyncContext, data: dict[str, int]) -> int:
        return data["sum"]

    with RunningWorker(app, nats.url, namespace) as client:
        yield client


def test_enqueue_and_result_without_a_loop(shop: SyncApp) -> None:
    """Send a run and wait for what its handler returns, in plain code."""
    run = shop.enqueue("add", 1, 2)
    assert run.result(timeout=60) == 3
    assert run.status().state == "done"
    assert run.cancel() is False


def test_enqueue_takes_jobs_options_and_keys(shop: SyncApp) -> None:
    """A job, a job with options and a name are all the same; a known key gives the earlier run."""
    add = shop.app.jobs["add"]
    run = shop.enqueue(add, 2, 2, key="four")
    assert run.result(timeout=60) == 4
    again = shop.enqueue(add.options(key="four"), 2, 2)
    assert (again.id, again.duplicate) == (run.id, True)
    assert again.result(timeout=60) == 4


def test_enqueue_many_keeps_the_order(shop: SyncApp) -> None:
    """Many at once, of any jobs; the handles come in the order of the requests."""
    add = shop.app.jobs["add"]
    runs = shop.enqueue_many(add.request(n, n) for n in range(50))
    assert [run.result(timeout=60) for run in runs] == [2 * n for n in range(50)]


def test_publish_reaches_subscribers(shop: SyncApp) -> None:
    """An event from plain code starts the jobs that subscribe to it; its id makes it one."""
    names = {"run": "note/=eorder-1"}
    for _ in range(2):
        shop.publish("added", {"sum": 7}, id="order-1")
    with ThreadPoolExecutor() as pool:
        assert pool.submit(wait_for_record, shop, names["run"]).result(timeout=60) == "done"


def wait_for_record(shop: SyncApp, run: str) -> str:
    async def look() -> str:
        backend = await shop.app.backend()
        return (await backend.wait(run, 0, 10)).state

    return shop._wait(look)


def test_work_that_is_no_job_is_done_once(shop: SyncApp) -> None:
    """The guard, from plain code: an exception leaves the work to the next caller."""
    done: list[str] = []
    with contextlib.suppress(ValueError), shop.once("document-42") as first:
        assert first
        raise ValueError("no")
    for name in ("second", "third"):
        with shop.once("document-42", ttl="1h") as first:
            if first:
                done.append(name)
    with shop.once("document-43") as first:
        first.fail()
    with shop.once("document-43") as again:
        assert again.epoch > first.epoch
        again.complete()
    assert done == ["second"]


def test_lines_of_a_run_are_followed_to_its_end(shop: SyncApp) -> None:
    """By a run's id too, with the type of its result."""
    run = shop.enqueue("talk", "ada")
    assert [line.text for line in shop.run(run.id).follow()] == ["hello ada"]


def test_cancel_stops_a_running_handler(shop: SyncApp) -> None:
    """A run can be cancelled while it runs, and its result says so."""
    run = shop.enqueue("wait_long")
    assert run.cancel() is True
    with pytest.raises(RunCancelled):
        run.result(timeout=60)


def test_result_in_no_time_is_a_timeout(shop: SyncApp) -> None:
    """Waiting ends when it was told to; the run goes on."""
    run = shop.enqueue("wait_long")
    with pytest.raises(ResultTimeout):
        run.result(timeout=0.05)
    assert run.cancel() is True


def test_errors_reach_the_caller(shop: SyncApp) -> None:
    """What cannot be sent is refused where it was called, before anything is sent."""
    with pytest.raises(UnknownJob, match="no job 'ad'"):
        shop.enqueue("ad", 1, 2)
    with pytest.raises(InvalidPayload):
        shop.enqueue("add", 1)


def test_threads_share_one_connection(shop: SyncApp) -> None:
    """All threads of a process use one background thread; each gets its own answers."""
    assert shop.enqueue("add", 1, 1).result(timeout=20) == 2
    before = {t for t in threading.enumerate() if t.name == "holdfast-sync"}
    with ThreadPoolExecutor(16) as pool:
        results = list(pool.map(lambda n: shop.enqueue("add", n, 1).result(timeout=20), range(200)))
    assert results == [n + 1 for n in range(200)]
    assert {t for t in threading.enumerate() if t.name == "holdfast-sync"} <= before


async def test_call_on_an_event_loop_is_refused(app: Holdfast) -> None:
    """Where it would block a loop, or deadlock with it, it says what to write instead."""

    @app.job
    async def add(ctx: Context) -> None: ...

    client = SyncApp(app)
    for call in (lambda: client.enqueue(add), lambda: client.publish("x"), client_many(client)):
        with pytest.raises(HoldfastError, match="await job"):
            call()
    assert client._thread is None


def client_many(client: SyncApp) -> Callable[[], object]:
    return lambda: client.enqueue_many([])


async def test_call_in_a_thread_of_a_loop_is_fine(app: Holdfast) -> None:
    """A plain handler, or a Django view under ASGI, runs in a thread: there it may be used."""

    @app.job
    async def add() -> None: ...

    with SyncApp(app) as client:
        run = await asyncio.to_thread(client.enqueue, add.options(key="a"))
        assert run.id == "add/a"
        await asyncio.to_thread(client.close)


def test_close_can_be_followed_by_another_call(shop: SyncApp) -> None:
    """Closing twice is fine, and the next call opens it again."""
    client = SyncApp(shop.app)
    with client:
        assert client.enqueue("add", 1, 1).result(timeout=60) == 2
    client.close()
    assert client.enqueue("add", 1, 2).result(timeout=60) == 3
    client.close()


def test_close_tells_those_who_wait(shop: SyncApp) -> None:
    """A thread that waits for a result does not wait for ever when the client is closed."""
    client = SyncApp(shop.app)
    run = client.enqueue("wait_long")
    with ThreadPoolExecutor() as pool:
        loop = client._running().loop
        before = len(asyncio.all_tasks(loop))
        waiting = pool.submit(run.result)
        while len(asyncio.all_tasks(loop)) == before:
            pass
        client.close()
        with pytest.raises(OutcomeUnknown):
            waiting.result(timeout=60)
    assert run.cancel() is True
    client.close()


def test_without_a_server_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """No server: an error after the connect timeout, and no thread that hangs."""
    monkeypatch.setenv("HOLDFAST_CONNECT_TIMEOUT_SECONDS", "0.3")
    app = Holdfast("shop", nats_url="nats://127.0.0.1:1")

    @app.job
    async def add() -> None: ...

    with SyncApp(app) as client, pytest.raises(NotConnected, match="holdfast server"):
        client.enqueue(add)


def test_eager_mode_works_without_a_loop(app: Holdfast) -> None:
    """A Django test that enqueues needs no server at all."""

    @app.job
    async def double(n: int) -> int:
        return 2 * n

    with eager(app), SyncApp(app) as client:
        assert client.enqueue(double, 4).result() == 8


# ---- processes


def in_child(body: Callable[[], None]) -> int:
    """Run it in a forked child; its exit code."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            body()
            code = 0
        except BaseException:  # noqa: BLE001 - a forked child must never go on with the tests
            traceback.print_exc()
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def test_forked_children_have_their_own_connection(shop: SyncApp) -> None:
    """As under gunicorn: parent and children enqueue at once, and no run is taken for another."""
    before = shop.enqueue("add", 0, 0)
    assert before.result(timeout=60) == 0
    add = shop.app.jobs["add"]
    read, write = os.pipe()

    def work() -> None:
        signal.alarm(60)
        assert before.status().state == "done"
        runs = shop.enqueue_many(add.request(n, 1) for n in range(20))
        assert [run.result(timeout=20) for run in runs] == [n + 1 for n in range(20)]
        os.write(write, "".join(f"{run.id}\n" for run in runs).encode())
        shop.close()

    codes = [in_child(work) for _ in range(3)]
    os.close(write)
    with os.fdopen(read) as pipe:
        ids = pipe.read().split()
    assert codes == [0, 0, 0]
    assert len(set(ids)) == 60
    assert shop.enqueue("add", 5, 5).result(timeout=60) == 10


def test_fork_while_another_thread_is_at_work(shop: SyncApp) -> None:
    """A child forked in the middle of other threads' calls does not inherit their locks."""
    done = threading.Event()

    def load() -> None:
        while not done.is_set():
            shop.enqueue("add", 1, 1)

    threads = [threading.Thread(target=load) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:

        def work() -> None:
            signal.alarm(30)
            assert shop.enqueue("add", 2, 3).result(timeout=20) == 5

        assert [in_child(work) for _ in range(3)] == [0, 0, 0]
    finally:
        done.set()
        for thread in threads:
            thread.join()


PROGRAM = """
import os, sys
from holdfast import Holdfast, SyncApp

app = Holdfast("shop", nats_url=sys.argv[1], namespace=sys.argv[2])

@app.job
async def add(a: int, b: int) -> int:
    return a + b

shop = SyncApp(app)
print(shop.enqueue(add, 1, 2).id)
if "fork" in sys.argv:
    if (child := os.fork()) == 0:
        print(shop.enqueue(add, 3, 4).id)
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0
    print(shop.enqueue(add, 5, 6).id)
"""


@pytest.mark.parametrize("mode", ["plain", "fork"])
def test_end_of_the_process_is_quiet(nats: Server, namespace: str, mode: str) -> None:
    """Without close(): no warning, no traceback, no delay, also in a child after a fork."""
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", PROGRAM, nats.url, namespace, mode],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.split()) == (1 if mode == "plain" else 3)


def test_failed_run_raises_its_error(app: Holdfast, nats: Server, namespace: str) -> None:
    """What the handler raised comes with the result, once its attempts are used up."""

    @app.job(delivery="at_most_once")
    async def fail() -> None:
        raise ValueError("out of stock")

    with (
        RunningWorker(app, nats.url, namespace) as client,
        pytest.raises(RunFailed, match="out of stock"),
    ):
        client.enqueue(fail).result(timeout=60)
