"""Many runs and many nodes: every page is bounded, so it shows a part and says so.

The suite has a few thousand runs and a hundred nodes; `HOLDFAST_SOAK=1` has 100,000 and 1,000. The
times are told, not asserted; what is asserted is that no page reads or shows everything.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import httpx
import msgspec
import pytest

from holdfast.broker.batch import Write, send_batch
from holdfast.client import Client
from holdfast.config import ConnectionConfig, WebConfig
from holdfast.model import node as nodes
from holdfast.model import run as runs
from holdfast.model.node import NodeRecord, Transition
from holdfast.model.run import Attempt, RunRecord
from holdfast.names import H_ERROR, H_MSG_ID, H_REASON, H_RUN, kv_subject
from holdfast.server import Server
from holdfast.web import create_app
from tests.integration.pages.world import Thread, WebServer
from tests.support import until

SOAK = bool(os.environ.get("HOLDFAST_SOAK"))
RUNS, NODES, LETTERS, QUEUED = (100_000, 1_000, 5_000, 20_000) if SOAK else (3_000, 100, 300, 1_000)
BATCH = 500
TRIES = 5


async def _fill(client: Client) -> str:
    """Records, messages, letters and nodes as the parts of Holdfast would have written them."""
    broker, names = client.broker, client.broker.names
    await client.topology.ensure()
    now = broker.server_now()
    writes: list[Write] = []
    for n in range(RUNS):
        at = now - 3000 + 3000 * n / RUNS
        state = "dead" if n % 1000 == 0 else "done"
        attempt = Attempt(1, f"worker-{n % 50}", n, at, at + 0.1, "done")
        record = RunRecord(
            state, "default", f"job{n % 20}", created=at - 1, started=at, ended=at + 0.1,
            attempts=(attempt,), result=msgspec.Raw(b'{"ok": true}'),
        )  # fmt: skip
        writes.append(Write(kv_subject(names.runs, f"r{n:07}"), runs.encode(record), {}))
    for n in range(NODES):
        node = NodeRecord(
            f"worker-{n}", "worker", "default", "RUNNING", "at work", now, started=now
        )
        writes.append(Write(kv_subject(names.nodes, node.id), nodes.encode(node), {}))
    await _store(client, writes)
    letters = [
        Write(
            names.dead_letter("default", f"job{n % 20}"), b'{"n": 1}',
            {H_RUN: f"r{n}", H_MSG_ID: f"d{n}", H_REASON: "failed", H_ERROR: f"ValueError: no {n}"},
        )
        for n in range(LETTERS)
    ]  # fmt: skip
    steps = [
        Transition(
            f"worker-{n}", "worker", "default", "CREATED", "RUNNING", "up", f"worker-{n}", now
        )
        for n in range(NODES)
    ]
    log = [Write(names.log("node", s.node), nodes.encode(s), {}) for s in steps]
    queued = [
        Write(names.job("default", f"job{n % 20}"), b"1", {H_MSG_ID: f"q{n}"})
        for n in range(QUEUED)
    ]
    for writes in (letters, log, queued):
        for write in writes:
            await broker.publish(write.subject, write.body, write.headers)
        await broker.flush()
    return "r0000001"


async def _store(client: Client, writes: list[Write]) -> None:
    by_stream: dict[str, list[Write]] = {}
    for write in writes:
        by_stream.setdefault(write.subject.split(".")[1], []).append(write)
    for group in by_stream.values():
        for start in range(0, len(group), BATCH):
            await (await send_batch(client.broker, group[start : start + BATCH]))


def visit(http: httpx.Client, path: str) -> tuple[float, float, int]:
    """Seconds until a page was there, seconds of this process's work, and the page's size."""
    begun, worked = time.perf_counter(), time.process_time()
    answer = http.get(path)
    assert answer.status_code == 200, path
    return time.perf_counter() - begun, time.process_time() - worked, len(answer.content)


@pytest.mark.timeout(900)
def test_pages_stay_bounded_with_many_runs_and_nodes(
    nats: Server, namespace: str, report: Callable[[str], None]
) -> None:
    """No page grows with what there is; each says how far it has looked."""
    thread = Thread()
    connection = ConnectionConfig(nats_url=nats.url, namespace=namespace)
    site = WebServer(
        thread, create_app(connection=connection, config=WebConfig(), open_to_all=True)
    )
    try:
        run = thread.call(_fill(site.app.state.services.client), 600)
        paths = ["/", "/jobs", "/runs", "/runs?state=dead", "/runs?state=running", f"/runs/{run}"]
        paths += ["/runs?prefix=r0000005", "/schedules", "/dead", "/dead/7", "/cluster"]
        paths += ["/cluster/worker-7", "/fleet", "/runs?state=queued", "/runs/q17?at=18"]
        with httpx.Client(base_url=site.url, headers={"Accept": "text/html"}, timeout=60) as http:
            first = [f"{path} {visit(http, path)[0] * 1e3:.0f} ms" for path in paths]
            report(f"while the runs are still being read: {', '.join(first)}")
            thread.call(until(lambda: site.app.state.services.run_index.complete, 300, "an index"))
            for path in paths:
                found = [visit(http, path) for _ in range(TRIES)]
                taken, work, size = [f[0] for f in found], min(f[1] for f in found), found[0][2]
                assert size < 400_000, path
                worst, middle = max(taken), sorted(taken)[len(taken) // 2]
                report(
                    f"{path}: median {middle * 1e3:.0f} ms, worst {worst * 1e3:.0f} ms, of which "
                    f"{work * 1e3:.0f} ms are work of this process; {size:,} B"
                )
            runs_page = http.get("/runs").text
            assert runs_page.count("<tr>") <= 51
            assert "searched back to" in runs_page
            assert http.get("/cluster").text.count('<th scope="row"><a data-main') == 50
            assert "r0000005" in http.get("/runs?prefix=r0000005").text
            newest = http.get("/dead").text.replace("\u202f", " ")
            assert ("Groups cover the newest 1 000 of" in newest) is (LETTERS > 1_000)
    finally:
        site.close()
        thread.close()
