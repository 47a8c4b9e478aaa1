"""Every action of an operator is defined once, and leaves one line in the audit."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import pytest
import typer

from holdfast import Holdfast
from holdfast.broker import Bucket
from holdfast.cli import build
from holdfast.client import Client
from holdfast.client.schedules import Schedules
from holdfast.clock import rfc3339
from holdfast.errors import InvalidInput, UnknownJob
from holdfast.identity import AccountSeed
from holdfast.model.schedule import define
from holdfast.names import H_ATTEMPT, H_RUN
from holdfast.server import Server
from holdfast.status.actions import ACTIONS, Operator, cancel_run, purge_job, replay_dead
from holdfast.status.audit import Audit, AuditLine, operator
from tests.fleet_world import World
from tests.integration.cli_support import holdfast
from tests.integration.support import working
from tests.integration.test_status import operating
from tests.integration.test_web_access import every_route
from tests.integration.web_support import site

READS: Final = frozenset(
    {"list", "show", "trace", "watch", "next", "why", "active", "diff", "status", "get", "backup"}
)
"""Verbs that change nothing on the server."""
LOCAL: Final = frozenset({"auth", "new", "deploy", "server", "demo", "dev"})
"""Nouns that work on files and processes of this machine."""
ROLES: Final = frozenset(
    {"worker", "scheduler", "coordinator", "control", "web", "agent", "dispatcher"}
)
LOCAL_VERBS: Final = frozenset({("secrets", "set"), ("secrets", "edit"), ("secrets", "seal")})
NAMED_ELSEWHERE: Final = {
    ("fleet", "run"): ("fleet", "command"),
    ("doctor", ""): ("doctor", "fix"),
    ("enqueue", ""): ("runs", "enqueue"),
    ("restore", ""): ("backup", "restore"),
}

Prepare = Callable[[Client], Awaitable[list[str]]]
"""Makes what a command acts on, and returns the command."""


async def letter(client: Client, *command: str) -> list[str]:
    subject = client.broker.names.dead_letter("default", "job")
    stored = await client.broker.store(subject, b"1", {H_RUN: "r1", H_ATTEMPT: "1"})
    return [*command, str(stored.seq), "--yes"]


async def queued(client: Client, *command: str) -> list[str]:
    subject = client.broker.names.job("default", "job")
    await client.broker.store(subject, b"1", {"Nats-Msg-Id": "r1"})
    return [*command]


async def scheduled(client: Client, *command: str, **rule: Any) -> list[str]:
    await Schedules(client).add(define("nightly", "job", **(rule or {"every": "1h"})))
    return ["schedules", *command]


async def backfill(client: Client) -> list[str]:
    now = client.broker.server_now()
    times = ["--from", rfc3339(now - 7200), "--to", rfc3339(now - 60)]
    return await scheduled(client, "backfill", "nightly", *times)


async def damaged(client: Client) -> list[str]:
    bucket = Bucket(client.broker, client.broker.names.runs)
    await bucket.put("r1", b"{", expected=0)
    return ["unreadable", "remove", bucket.name, "r1", "--yes"]


async def drifted(client: Client) -> list[str]:
    await client.topology.update_stream(client.broker.names.ledger, {"max_age": 10**12})
    return ["doctor", "--fix", "--yes"]


CASES: Final[dict[tuple[str, str], tuple[Prepare, dict[str, Any]]]] = {
    ("runs", "enqueue"): (lambda c: queued(c, "enqueue", "job"), {"job": "job"}),
    ("runs", "cancel"): (lambda c: queued(c, "runs", "cancel", "r1"), {"runs": ("r1",)}),
    ("runs", "retry"): (lambda c: letter(c, "runs", "retry"), {"runs": ("r1",)}),
    ("dead", "replay"): (lambda c: letter(c, "dead", "replay"), {"runs": ("r1",)}),
    ("dead", "drop"): (lambda c: letter(c, "dead", "drop"), {"runs": ("r1",)}),
    ("jobs", "pause"): (lambda c: queued(c, "jobs", "pause", "job"), {"job": "job"}),
    ("jobs", "resume"): (lambda c: queued(c, "jobs", "resume", "job"), {"job": "job"}),
    ("jobs", "purge"): (lambda c: queued(c, "jobs", "purge", "job", "--yes"), {"count": 1}),
    ("schedules", "add"): (
        lambda c: queued(c, "schedules", "add", "nightly", "job", "--every", "1h"),
        {"detail": "nightly", "job": "job"},
    ),
    ("schedules", "remove"): (
        lambda c: scheduled(c, "remove", "nightly", "--yes"),
        {"detail": "nightly"},
    ),
    ("schedules", "pause"): (lambda c: scheduled(c, "pause", "nightly"), {"detail": "nightly"}),
    ("schedules", "resume"): (lambda c: scheduled(c, "resume", "nightly"), {"detail": "nightly"}),
    ("schedules", "trigger"): (lambda c: scheduled(c, "trigger", "nightly"), {"detail": "nightly"}),
    ("schedules", "backfill"): (backfill, {"detail": "nightly"}),
    ("unreadable", "remove"): (damaged, {}),
    ("doctor", "fix"): (drifted, {}),
}
ELSEWHERE: Final = {
    ("schedules", "sync"): "test_sync_leaves_a_line_when_it_changed_something",
    ("nodes", "drain"): "test_drain_leaves_a_line",
    ("agents", "forget"): "test_fleet_actions_leave_a_line_each",
    ("fleet", "command"): "test_fleet_actions_leave_a_line_each",
    ("fleet", "cancel"): "test_fleet_actions_leave_a_line_each",
    ("settings", "push"): "test_settings_actions_leave_a_line_each",
    ("secrets", "rotate"): "test_settings_actions_leave_a_line_each",
    ("backup", "restore"): "test_restore_leaves_a_line",
}
"""Actions that need more than a namespace: the test that covers them."""


def test_every_action_is_covered() -> None:
    """A new action needs a test that it leaves its line."""
    assert CASES.keys() | ELSEWHERE.keys() == ACTIONS.keys()
    assert not CASES.keys() & ELSEWHERE.keys()
    assert all(name in globals() for name in ELSEWHERE.values())


def test_every_changing_command_is_an_action() -> None:
    """A command is in the table, or it changes nothing on the server."""
    root: Any = typer.main.get_command(build())
    for noun, found in root.commands.items():
        if noun in LOCAL | ROLES:
            continue
        for verb in getattr(found, "commands", {"": found}):
            if verb in READS or noun in READS or (noun, verb) in LOCAL_VERBS:
                continue
            assert NAMED_ELSEWHERE.get((noun, verb), (noun, verb)) in ACTIONS, (noun, verb)


def test_every_action_says_what_it_does() -> None:
    """The sentence of an action is the help of its command."""
    assert all(action.doc and action.doc.endswith(".") for action in ACTIONS.values())


async def only_line(client: Client, noun: str, verb: str) -> AuditLine:
    """The one line that the audit has."""
    lines = await Audit(client).actions()
    assert [(one.noun, one.verb, one.who) for one in lines] == [(noun, verb, operator())]
    return lines[0]


@pytest.mark.parametrize(("noun", "verb"), CASES, ids=lambda part: str(part))
async def test_command_leaves_one_line(app: Holdfast, noun: str, verb: str) -> None:
    """With who did it, the verb, and what it was done to."""
    prepare, expected = CASES[noun, verb]
    async with operating(app) as client:
        command = await prepare(client)
        if (noun, verb) == ("runs", "retry"):
            command = ["runs", "retry", "r1"]
        ended = await holdfast(app, *command)
        if noun != "doctor":  # of which other findings decide
            assert ended.code == 0, ended.err
        line = await only_line(client, noun, verb)
        assert {name: getattr(line, name) for name in expected} == expected
        assert line.runs or line.job or line.detail


async def test_refused_action_leaves_no_line(app: Holdfast) -> None:
    """Neither an error, nor an ended run, nor a dry run is something that was done."""
    async with operating(app) as client:
        by = Operator(client)
        with pytest.raises(UnknownJob):
            await purge_job(by, "nobody")
        with pytest.raises(InvalidInput):
            await purge_job(by)
        await letter(client)
        assert [d.result for d in await replay_dead(by, [1], dry_run=True)] == ["would replay"]
        assert await Audit(client).actions() == []


async def test_action_that_is_cut_off_leaves_a_line_of_what_it_did(
    app: Holdfast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replay that fails at its second letter has sent the first one."""
    async with operating(app) as client:
        subject = client.broker.names.dead_letter("default", "job")
        for run in ("r1", "r2"):
            await client.broker.store(subject, b"1", {H_RUN: run, H_ATTEMPT: "1"})
        by = Operator(client, "ada")
        replay = by.dead._replay

        async def once(letter: Any, *rest: Any) -> Any:
            if letter.run == "r2":
                raise InvalidInput("cut off")
            return await replay(letter, *rest)

        monkeypatch.setattr(by.dead, "_replay", once)
        with pytest.raises(InvalidInput):
            await replay_dead(by, [1, 2])
        lines = await by.audit.actions()
        assert [(one.who, one.verb, one.runs) for one in lines] == [("ada", "replay", ("r1",))]


async def test_cancel_of_an_ended_run_leaves_no_line(app: Holdfast) -> None:
    """It changed nothing."""

    @app.job
    async def quick() -> None:
        return None

    async with operating(app) as client:
        async with working(app):
            run = await quick.enqueue()
            await run.result(10)
        assert not await cancel_run(Operator(client), run.id)
        assert await Audit(client).actions() == []


# ---- those that need more than a namespace


async def test_sync_leaves_a_line_when_it_changed_something(app: Holdfast) -> None:
    """Registering the same schedules again changes nothing."""
    async with operating(app) as client:
        by, sync = Operator(client), ACTIONS["schedules", "sync"]
        defined = {"nightly": define("nightly", "job", every="1h")}
        await sync(by, "shop", defined)
        await sync(by, "shop", defined)
        assert (await only_line(client, "schedules", "sync")).detail == "shop"


async def test_drain_leaves_a_line(app: Holdfast) -> None:
    """With the node's name."""

    @app.job
    async def quick() -> None:
        return None

    async with operating(app) as client, working(app):
        node = (await Operator(client).nodes.list(role="worker"))[0].id
        await holdfast(app, "nodes", "drain", node)
        assert (await only_line(client, "nodes", "drain")).detail == node


async def test_fleet_actions_leave_a_line_each(
    app: Holdfast, nats: Server, namespace: str, tmp_path: Path
) -> None:
    """A command, its cancellation, and an agent that is forgotten."""
    async with World(nats, namespace, tmp_path) as world, world.dispatcher():
        await world.start_agents("web1", "web2")
        async with operating(app) as client:
            ended = await holdfast(app, "fleet", "run", "web1", "ping", "--id", "f1")
            assert (ended.code, ended.out) == (0, "web1  ok  true\n")
            started = await holdfast(
                app, "fleet", "run", "web1", "mark", "slow", "30", "--detach", "--id", "f2"
            )
            assert started.code == 0
            assert (await holdfast(app, "fleet", "cancel", "f2")).code == 0
            await world.agents["web2"].close()
            assert (await holdfast(app, "agents", "forget", "web2")).code == 0
            lines = await Audit(client).actions()
            assert [(one.noun, one.verb, one.runs or one.detail) for one in lines] == [
                ("agents", "forget", "web2"),
                ("fleet", "cancel", ("f2",)),
                ("fleet", "command", ("f2",)),
                ("fleet", "command", ("f1",)),
            ]


async def test_settings_actions_leave_a_line_each(app: Holdfast, tmp_path: Path) -> None:
    """A push that changes nothing leaves none."""
    folder = tmp_path / "settings"
    folder.mkdir()
    (folder / "top.yaml").write_text("base:\n  '*': [common]\n")
    (folder / "common.yaml").write_text("db:\n  host: here\n")
    seed = str(tmp_path / "account.seed")
    AccountSeed.create(seed)
    async with operating(app) as client:
        for command in (["settings", "push", str(folder)],) * 2 + (["secrets", "rotate"],):
            ended = await holdfast(app, *command, "--seed", seed)
            assert ended.code == 0, ended.err
        lines = await Audit(client).actions()
        assert [(one.noun, one.verb, one.detail) for one in lines] == [
            ("secrets", "rotate", "generation 1 and 2"),
            ("settings", "push", "revision 1"),
        ]


async def test_restore_leaves_a_line(app: Holdfast, tmp_path: Path) -> None:
    """On a server that takes every login; one of the role backup may not write to the ledger."""
    async with operating(app) as client:
        names = client.broker.names
        assert (await holdfast(app, "backup", str(tmp_path / "b"))).code == 0
        await client.broker.api(f"STREAM.DELETE.{names.events}")
        ended = await holdfast(app, "restore", str(tmp_path / "b"), "--missing", "--json")
        assert json.loads(ended.out)["streams"] == {names.events: 0}
        assert (await only_line(client, "backup", "restore")).detail == names.events


# ---- the API


API: Final[dict[str, tuple[Prepare, str, Any, str]]] = {
    "POST /runs": (queued, "/runs", {"job": "add", "payload": {"a": 1, "b": 2}}, "enqueue"),
    "POST /runs/{run}/cancel": (queued, "/runs/r1/cancel", None, "cancel"),
    "POST /runs/{run}/retry": (letter, "/runs/r1/retry", None, "retry"),
    "POST /dead/replay": (letter, "/dead/replay", {"ids": [1]}, "replay"),
    "POST /dead/drop": (letter, "/dead/drop", {"ids": [1]}, "drop"),
    "POST /dead/{id}/replay": (letter, "/dead/1/replay", {}, "replay"),
    "DELETE /dead/{id}": (letter, "/dead/1", None, "drop"),
    "POST /jobs/{group}/{job}/pause": (queued, "/jobs/default/job/pause", None, "pause"),
    "POST /jobs/{group}/{job}/resume": (queued, "/jobs/default/job/resume", None, "resume"),
    "POST /jobs/{group}/{job}/purge": (
        queued,
        "/jobs/default/job/purge",
        {"which": "all"},
        "purge",
    ),
    "POST /schedules": (
        queued,
        "/schedules",
        {"name": "nightly", "job": "job", "every": "1h"},
        "add",
    ),
    "DELETE /schedules/{name}": (scheduled, "/schedules/nightly", None, "remove"),
    "POST /schedules/{name}/pause": (scheduled, "/schedules/nightly/pause", None, "pause"),
    "POST /schedules/{name}/resume": (scheduled, "/schedules/nightly/resume", None, "resume"),
    "POST /schedules/{name}/trigger": (scheduled, "/schedules/nightly/trigger", None, "trigger"),
    "POST /schedules/{name}/backfill": (
        scheduled,
        "/schedules/nightly/backfill",
        {"start": "2026-01-01T00:00:00Z", "end": "2026-01-01T02:00:00Z"},
        "backfill",
    ),
}
API_FLEET: Final = {
    "POST /fleet/runs",
    "POST /fleet/runs/{run}/cancel",
    "DELETE /agents/{agent}",
    "POST /nodes/{node}/drain",
}
"""Covered by `test_fleet_routes_leave_a_line_each`."""


async def test_every_changing_route_is_covered(nats: Server, namespace: str) -> None:
    """A new route of the API that changes something needs a test that it leaves its line."""
    async with site(nats, namespace) as there:
        found = {
            f"{method} {route.path.removeprefix('/api/v1')}"
            for method, path, route in every_route(there.web)
            if method != "GET" and path.startswith("/api/v1")
        }
    assert found == API.keys() | API_FLEET


@pytest.mark.parametrize("route", API)
async def test_route_leaves_one_line(nats: Server, namespace: str, route: str) -> None:
    """With the owner of the token, whatever the role of the web's own login."""
    prepare, path, body, verb = API[route]
    async with site(nats, namespace) as there:
        await prepare(there.client)
        answered = await there.admin.request(route.partition(" ")[0], path, json=body)
        assert answered.is_success, answered.text
        lines = await Audit(there.client).actions()
        assert [(one.verb, one.who) for one in lines] == [(verb, "a-admin")]
        assert lines[0].runs or lines[0].job or lines[0].detail


async def test_fleet_routes_leave_a_line_each(nats: Server, namespace: str, tmp_path: Path) -> None:
    """A command, its cancellation, an agent that is forgotten, and a drained node."""
    async with World(nats, namespace, tmp_path) as world, world.dispatcher():
        await world.start_agents("web1", "web2")
        async with site(nats, namespace) as there:
            node = (await Operator(there.client).nodes.list(role="web"))[0].id
            order = {"target": "web1", "function": "mark", "args": ["slow", 30], "id": "f1"}
            assert (await there.admin.post("/fleet/runs", json=order)).is_success
            assert (await there.admin.post("/fleet/runs/f1/cancel")).is_success
            await world.agents["web2"].close()
            assert (await there.admin.delete("/agents/web2")).is_success
            assert (await there.admin.post(f"/nodes/{node}/drain")).is_success
            lines = await Audit(there.client).actions()
            assert [(one.verb, one.who) for one in lines] == [
                (verb, "a-admin") for verb in ("drain", "forget", "cancel", "command")
            ]
