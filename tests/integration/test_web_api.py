"""The API noun by noun, with a worker behind it: what the command line can do, it can."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import httpx

from holdfast.coordinator.indexer import Indexer
from holdfast.model import fleet
from holdfast.model.fleet import FleetRequest, FleetRun, Return
from holdfast.names import H_EXPECTED, fleet_key, kv_subject, return_key
from holdfast.server import Server
from holdfast.testing import RunningWorker
from tests.integration.test_web_access import every_route
from tests.integration.web_support import (
    WebApp,
    dead_letters,
    node_records,
    run_records,
    shop,
    site,
    store_all,
    waiting_runs,
)

BIG = bool(os.environ.get("HOLDFAST_SOAK"))
RUNS = 100_000 if BIG else 3_000
NODES = 1_000 if BIG else 60


async def every_page(client: httpx.AsyncClient, path: str, limit: int) -> list[Any]:
    """All items of a list, page by page."""
    found: list[Any] = []
    cursor = ""
    join = "&" if "?" in path else "?"
    while True:
        page = (await client.get(f"{path}{join}limit={limit}&cursor={cursor}")).json()
        assert len(page["items"]) <= limit
        found += page["items"]
        cursor = page["next"]
        if not cursor:
            return found


async def test_run_is_sent_watched_and_told(nats: Server, namespace: str) -> None:
    """Enqueue with a key, wait for the result, show it, tell its story; a repeat is known."""
    app = shop()
    async with (
        site(nats, namespace, app) as there,
        RunningWorker(app, nats_url=nats.url, namespace=namespace),
    ):
        sent = {"job": "add", "payload": {"a": 1, "b": 2}, "key": "one/1", "headers": {"X-A": "b"}}
        first = await there.operator.post("/runs", json=sent)
        assert first.status_code == 201
        assert first.json()["run"] == "add/one=2F1"
        part = "add~one=2F1"
        result = (await there.viewer.get(f"/runs/{part}/result?wait=20")).json()
        assert (result["state"], result["result"]) == ("done", 3)
        again = (await there.operator.post("/runs", json=sent)).json()
        known = {"run": "add/one=2F1", "job": "add", "group": "default", "duplicate": True}
        assert again == {**known, "state": "done"}
        shown = (await there.viewer.get(f"/runs/{part}")).json()
        assert shown["info"]["state"] == "done"
        assert [a["outcome"] for a in shown["attempts"]] == ["done"]
        story = (await there.viewer.get(f"/runs/{part}/trace")).json()
        assert [s["what"] for s in story["steps"]][:1] == ["accepted"]
        assert "done" in [s["what"] for s in story["steps"]]
        wrong = await there.operator.post("/runs", json={"job": "add", "payload": {"a": "x"}})
        assert wrong.status_code == 422
        once_more = (await there.operator.post(f"/runs/{part}/retry")).json()
        assert "sent again, as run r" in once_more["detail"]


async def test_run_of_a_job_that_nobody_has_is_taken_with_a_hint(
    nats: Server, namespace: str
) -> None:
    """It is legal and stored; the answer and the run say that no worker has ever served the job."""
    app = shop()
    async with (
        site(nats, namespace) as there,
        RunningWorker(app, nats_url=nats.url, namespace=namespace),
    ):
        sent = await there.operator.post("/runs", json={"job": "ad", "key": "1"})
        assert sent.status_code == 201
        assert "no worker has ever served job ad of group default" in sent.json()["hint"]
        shown = (await there.viewer.get("/runs/ad~1")).json()
        assert shown["where"].startswith("in the queue of ad as message")
        assert "no worker has ever served job ad" in shown["where"]
        later = {"job": "ad", "key": "2", "delay": "1h"}
        assert "hint" in (await there.operator.post("/runs", json=later)).json()
        assert "has ever served" in (await there.viewer.get("/runs/ad~2")).json()["where"]
        moved = await there.operator.post("/runs", json={"job": "add", "group": "other"})
        assert "it is served in group default" in moved.json()["hint"]
        fine = {"job": "add", "payload": {"a": 1, "b": 2}}
        assert "hint" not in (await there.operator.post("/runs", json=fine)).json()
        assert (await there.operator.post("/runs", json={"job": "a b"})).status_code == 422


async def test_unknown_members_of_a_query_are_refused_everywhere(
    nats: Server, namespace: str
) -> None:
    """A misspelt filter is told with the one that was meant, instead of listing everything."""
    async with site(nats, namespace) as there:
        told = (await there.viewer.get("/runs?sate=failed")).json()
        assert told["status"] == 422
        assert told["detail"].startswith("Unknown query parameter 'sate': did you mean state?")
        assert "Known here: cursor, group, job, limit" in told["detail"]
        far = (await there.viewer.get("/runs?zzz=1")).json()["detail"]
        assert far.startswith("Unknown query parameter 'zzz'. Known here: cursor")
        none = (await there.viewer.get("/nodes/n1?limit=1")).json()["detail"]
        assert none == "Unknown query parameter 'limit'. None are known here"
        asked = 0
        for method, path, route in every_route(there.web):
            if path.startswith("/api/v1/") and hasattr(route, "dependant"):
                asking = f"{path.removeprefix('/api/v1')}?limt=1"
                answer = await there.admin.request(method, asking)
                assert answer.status_code == 422, f"{method} {path}"
                assert "Unknown query parameter 'limt'" in answer.json()["detail"], path
                asked += 1
        assert asked > 40


async def test_waiting_run_is_shown_and_cancelled(nats: Server, namespace: str) -> None:
    """Without a worker: queued and delayed runs are listed with their payload, and cancelled."""
    async with site(nats, namespace) as there:
        one = (await there.operator.post("/runs", json={"job": "add", "payload": {"a": 1}})).json()
        two = (await there.operator.post("/runs", json={"job": "add", "delay": "1h"})).json()
        states = {r["run"]: r["state"] for r in (await there.viewer.get("/runs")).json()["items"]}
        assert states == {one["run"]: "queued", two["run"]: "delayed"}
        shown = (await there.viewer.get(f"/runs/{one['run']}")).json()
        assert shown["payload"] == {"encoding": "utf-8", "text": '{"a":1}'}
        early = await there.viewer.get(f"/runs/{one['run']}/result")
        assert (early.status_code, early.json()["state"]) == (202, "queued")
        for run in (one["run"], two["run"]):
            answer = await there.operator.post(f"/runs/{run}/cancel")
            assert answer.json() == {"run": run, "cancelled": True}
        found = (await there.viewer.get("/runs?state=cancelled")).json()["items"]
        assert {r["run"] for r in found} == {one["run"], two["run"]}


async def test_dead_letters_are_replayed_edited_and_dropped(nats: Server, namespace: str) -> None:
    """One as it was, one edited, many by a filter; what is dropped is gone."""
    app = shop()
    async with (
        site(nats, namespace, app) as there,
        RunningWorker(app, nats_url=nats.url, namespace=namespace),
    ):
        for why in ("a", "b", "c"):
            sent = {"job": "boom", "payload": {"why": why}, "key": why}
            await there.operator.post("/runs", json=sent)
            await there.viewer.get(f"/runs/boom~{why}/result?wait=20")
        letters = (await there.viewer.get("/dead")).json()["items"]
        assert [letter["run"] for letter in letters] == ["boom/c", "boom/b", "boom/a"]
        pages = await every_page(there.viewer, "/dead", 1)
        assert [letter["id"] for letter in pages] == [letter["id"] for letter in letters]
        groups = (await there.viewer.get("/dead/groups")).json()["items"]
        assert sum(g["count"] for g in groups) == 3
        first = letters[-1]["id"]
        body = (await there.operator.get(f"/dead/{first}")).json()["body"]
        assert body["text"] == '{"why":"a"}'
        edited = {"payload": {"why": "edited"}}
        done = await there.operator.post(f"/dead/{first}/replay", json=edited)
        assert done.json()["result"] == "replayed"
        await there.viewer.get("/runs/boom~a/result?wait=20")
        asked: dict[str, Any] = {"job": "boom", "error": "edited", "dry_run": True}
        would = (await there.operator.post("/dead/replay", json=asked)).json()
        assert [w["result"] for w in would] == ["would replay"]
        typed = {"Content-Type": "application/json"}
        as_it_was = await there.operator.post(f"/dead/{letters[0]['id']}/replay", headers=typed)
        assert as_it_was.json()["result"] == "replayed", "an empty body is an empty object"
        await there.viewer.get("/runs/boom~c/result?wait=20")
        none = await there.admin.post("/dead/drop", json={})
        assert none.status_code == 422
        dropped = (await there.admin.post("/dead/drop", json={"job": "boom"})).json()
        assert [d["result"] for d in dropped] == ["dropped"] * 3
        assert (await there.viewer.get("/dead")).json()["items"] == []


async def test_jobs_are_paused_resumed_and_purged(nats: Server, namespace: str) -> None:
    """A paused job delivers nothing; what waits can be removed."""
    app = shop()
    async with (
        site(nats, namespace, app) as there,
        RunningWorker(app, nats_url=nats.url, namespace=namespace),
    ):
        assert (await there.operator.post("/jobs/default/add/pause")).json()["paused"]
        await there.operator.post("/runs", json={"job": "add", "payload": {"a": 1, "b": 2}})
        info = (await there.viewer.get("/jobs/default/add")).json()
        assert info["parameters"] == ["a", "b"]
        assert info["doc"] == "Add two numbers."
        assert (info["info"]["waiting"], info["info"]["in_flight"]) == (1, 0)
        purged = await there.admin.post("/jobs/default/add/purge", json={"which": "all"})
        assert purged.json()["waiting"] == 1
        assert not (await there.operator.post("/jobs/default/add/resume")).json()["paused"]
        names = [j["job"] for j in await every_page(there.viewer, "/jobs", 1)]
        assert names == ["add", "boom", "login"]


async def test_schedules_have_every_verb(nats: Server, namespace: str) -> None:
    """Add, show, next, why, pause, resume, trigger, backfill, slots, remove."""
    async with site(nats, namespace) as there:
        new = {"name": "s", "job": "add", "cron": "0 * * * *", "tz": "Europe/Paris"}
        added = await there.admin.post("/schedules", json={**new, "payload": {"a": 1}})
        assert added.status_code == 201
        assert added.json()["payload"] == {"a": 1}
        assert (await there.admin.post("/schedules", json=new)).status_code == 422
        assert (await there.admin.post("/schedules", json={**new, "replace": True})).is_success
        coming = (await there.viewer.get("/schedules/s/next?limit=3")).json()["items"]
        assert len(coming) == 3
        why = (await there.viewer.get(f"/schedules/s/why?at={coming[0]['slot']}")).json()
        assert why["verdict"] == "future"
        assert (await there.operator.post("/schedules/s/pause")).json()["paused"]
        assert not (await there.operator.post("/schedules/s/resume")).json()["paused"]
        run = (await there.operator.post("/schedules/s/trigger")).json()["run"]
        past = {"start": "2026-01-01T00:00:00Z", "end": "2026-01-01T03:00:00Z"}
        filled = (await there.operator.post("/schedules/s/backfill", json=past)).json()
        assert (len(filled["sent"]), filled["known"]) == (4, [])
        again = (await there.operator.post("/schedules/s/backfill", json=past)).json()
        assert (again["sent"], len(again["known"])) == ([], 4)
        slots = await every_page(there.viewer, "/slots?schedule=s", 3)
        assert [s["slot"] for s in slots] == filled["sent"][::-1]
        assert {s["verdict"] for s in slots} == {"sent"}
        listed = (await there.viewer.get("/runs")).json()["items"]
        assert {r["run"] for r in listed} == {run, *(s["run"] for s in slots)}
        assert (await there.admin.delete("/schedules/s")).is_success
        assert (await there.viewer.get("/schedules")).json()["items"] == []


async def test_fleet_is_shown_as_it_is_stored(nats: Server, namespace: str) -> None:
    """Runs with their returns, agents with their facts; without a dispatcher nothing is sent."""
    async with site(nats, namespace) as there:
        for path in ("/fleet/runs", "/agents", "/settings/agents"):
            assert (await there.viewer.get(path)).json() == {"items": [], "next": ""}
        assert (await there.viewer.get("/settings")).json()["revision"] == 0
        await _store_fleet(there)
        found = await every_page(there.viewer, "/fleet/runs", 1)
        assert [f["run"] for f in found] == ["f2", "f1"]
        shown = (await there.viewer.get("/fleet/runs/f1")).json()
        assert shown["kwargs"] == {"password": "•••"}
        assert shown["info"]["returned"] == 2
        returned = await every_page(there.viewer, "/fleet/runs/f1/returns", 1)
        assert [(r["agent"], r["outcome"]) for r in returned] == [("a1", "ok"), ("a2", "failed")]
        agents = await every_page(there.viewer, "/agents?target=G@os:linux", 1)
        assert [a["id"] for a in agents] == ["a1", "a2"]
        assert (await there.viewer.get("/agents/a1")).json()["facts"] == {"os": "linux"}
        assert (await there.viewer.get("/agents?target=(")).status_code == 422
        assert (await there.admin.delete("/agents/a2")).json() == {"agent": "a2"}
        assert len((await there.viewer.get("/agents")).json()["items"]) == 1
        order = {"target": "*", "function": "ping"}
        refused = await there.admin.post("/fleet/runs", json=order)
        assert refused.status_code == 409
        assert "dispatcher" in refused.json()["detail"]


async def _store_fleet(there: WebApp) -> None:
    """What dispatchers and agents would have stored."""
    client = there.client
    names = client.broker.names
    for noun in ("fleet", "returns", "facts", "agents"):
        await client.topology.ensure_buckets(noun)

    async def put(bucket: str, key: str, body: bytes) -> None:
        await client.broker.store(kv_subject(bucket, key), body, {H_EXPECTED: "0"})

    for n, run in enumerate(("f1", "f2"), 1):
        request = FleetRequest(run, "*", "ping", kwargs={"password": "x"})
        record = FleetRun(request, "failed", ("a1", "a2"), created=float(n), ended=9.0)
        await put(names.fleet, fleet_key(run), fleet.encode(record))
    await put(names.returns, return_key("f1", "a1"), fleet.encode(Return("f1", "a1", "ok")))
    failed = Return("f1", "a2", "failed", error="no")
    await put(names.returns, return_key("f1", "a2"), fleet.encode(failed))
    for agent in ("a1", "a2"):
        await put(names.facts, agent, b'{"os": "linux"}')


async def test_stats_count_what_ended_waits_and_comes(nats: Server, namespace: str) -> None:
    """Throughput, failures, lag, the oldest waiting run, what is due next, nodes by role."""
    app = shop()
    async with site(nats, namespace, app) as there:
        async with RunningWorker(app, nats_url=nats.url, namespace=namespace):
            assert (await there.viewer.get("/stats")).json()["ended"] == {}
            for job, body in (("add", {"a": 1, "b": 2}), ("boom", {"why": "x"})):
                run = (
                    await there.operator.post("/runs", json={"job": job, "payload": body})
                ).json()
                await there.viewer.get(f"/runs/{run['run']}/result?wait=20")
        await there.operator.post("/runs", json={"job": "add", "payload": {"a": 1, "b": 2}})
        await there.admin.post("/schedules", json={"name": "s", "job": "add", "every": "1h"})
        await Indexer(there.client.broker, "c1").step()  # as a coordinator does every two seconds
        told = (await there.viewer.get("/stats")).json()
        assert told["ended"] == {"done": 1, "failed": 1, "dead": 1}
        assert (told["failures"], told["waiting"], told["dead"]) == (2, 1, 1)
        assert told["oldest_waiting"]["job"] == "add"
        assert [d["schedule"] for d in told["next_due"]] == ["s"]
        assert told["nodes"]["web"] == {"RUNNING": 1}


async def test_unchanged_answers_are_not_sent_again(nats: Server, namespace: str) -> None:
    """Who names the ETag gets an empty 304 until something has changed."""
    async with site(nats, namespace) as there:
        first = await there.viewer.get("/runs")
        known = {"if-none-match": first.headers["etag"]}
        again = await there.viewer.get("/runs", headers=known)
        assert (again.status_code, again.content) == (304, b"")
        await there.operator.post("/runs", json={"job": "add"})
        assert (await there.viewer.get("/runs", headers=known)).status_code == 200


async def test_lists_are_complete_and_bounded(
    nats: Server, namespace: str, report: Callable[[str], None]
) -> None:
    """Page by page every run comes once, newest first; the time of each list is told."""
    async with site(nats, namespace) as there:
        client = there.client
        await store_all(client, run_records(client, RUNS))
        await store_all(client, dead_letters(client, RUNS // 10), atomic=False)
        await store_all(client, waiting_runs(client, RUNS // 10))
        await store_all(client, node_records(client, NODES))
        runs = await every_page(there.viewer, "/runs", 500)
        assert len(runs) == len({r["run"] for r in runs}) == RUNS + RUNS // 10
        dead = await every_page(there.viewer, "/runs?state=dead", 50)
        assert len(dead) == RUNS // 1000
        assert len(await every_page(there.viewer, "/runs?state=lost", 50)) == 1
        assert len(await every_page(there.viewer, "/dead", 500)) == RUNS // 10
        assert len(await every_page(there.viewer, "/nodes?role=worker", 50)) == NODES
        times = {path: await _seconds(there, path) for path in LISTS}
        for path in sorted(LISTS, key=lambda path: times[path])[-1 if not BIG else 0 :]:
            took, busy = times[path]
            report(
                f"{RUNS:,} runs, {NODES:,} nodes: {path} {1000 * took:.0f} ms, "
                f"of which {1000 * busy:.0f} ms on a processor"
            )


LISTS = (
    "/runs",
    "/runs?limit=500",
    "/runs?state=dead",
    "/runs?state=lost",
    "/runs?state=queued",
    "/runs?state=running",
    "/runs?job=job3",
    "/runs?prefix=r0000001",
    "/jobs",
    "/dead",
    "/dead?limit=500",
    "/dead/groups",
    "/nodes",
    "/nodes?limit=500",
    "/schedules",
    "/audit",
    "/stats",
    "/fleet/runs",
    "/agents",
)


async def _seconds(there: WebApp, path: str) -> tuple[float, float]:
    """How long a list takes, and how long of it we work; the best of three."""
    taken = []
    for _ in range(3):
        begun, worked = time.perf_counter(), time.process_time()
        assert (await there.viewer.get(path)).status_code == 200
        taken.append((time.perf_counter() - begun, time.process_time() - worked))
    return min(taken)
