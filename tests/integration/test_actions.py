"""Every action of an operator is defined once, and leaves one line in the audit."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Final

import pytest
import typer

from holdfast import Flow, Holdfast
from holdfast.broker import Bucket
from holdfast.cli import build
from holdfast.client import Client
from holdfast.client.schedules import Schedules
from holdfast.clock import rfc3339
from holdfast.errors import InvalidInput, UnknownJob
from holdfast.identity.seed import AccountSeed
from holdfast.model import run as runs
from holdfast.model.join import RECORD as JOIN
from holdfast.model.join import JoinRecord, fingerprint
from holdfast.model.limit import Limit
from holdfast.model.run import RunRecord
from holdfast.model.schedule import define
from holdfast.names import H_ATTEMPT, H_RUN, join_key
from holdfast.ownership.rules import Rules
from holdfast.server import Server
from holdfast.settings import canary
from holdfast.settings.canary import Trial
from holdfast.settings.publisher import Publisher
from holdfast.settings.sealing import Sealer
from holdfast.status import fleet_actions as actions
from holdfast.status.actions import cancel_run, purge_job, replay_dead
from holdfast.status.audit import Audit, AuditLine, operator
from holdfast.status.operators import ACTIONS, Operator
from tests.fleet_world import World
from tests.integration.cli_support import holdfast
from tests.integration.support import until, working
from tests.integration.test_status import operating
from tests.integration.test_web_access import every_route
from tests.integration.test_web_security import form_token, log_in
from tests.integration.web_support import TOKENS, site

READS: Final = frozenset(
    {
        "list",
        "show",
        "trace",
        "logs",
        "watch",
        "next",
        "why",
        "active",
        "diff",
        "status",
        "get",
        "copy",
        "top",
        "backup",
        "history",
        "slots",
        "pending",
        "resolve",
        "journal",
    }
)
"""Verbs that change nothing on the server."""
LOCAL: Final = frozenset({"auth", "new", "deploy", "server", "demo", "dev"})
"""Nouns that work on files and processes of this machine."""
ROLES: Final = frozenset(
    {"worker", "relay", "scheduler", "coordinator", "control", "web", "agent", "dispatcher"}
)
LOCAL_VERBS: Final = frozenset(
    {("secrets", "set"), ("secrets", "edit"), ("secrets", "seal"), ("alerts", "test")}
)
NAMED_ELSEWHERE: Final = {
    ("fleet", "run"): ("fleet", "command"),
    ("doctor", ""): ("doctor", "fix"),
    ("runs", "edit"): ("runs", "retry"),
    ("enqueue", ""): ("runs", "enqueue"),
    ("publish", ""): ("events", "publish"),
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


async def limited(client: Client, *command: str) -> list[str]:
    await client.topology.ensure_buckets("limits")
    await Rules(client.broker).register(Limit(running=2, name="db"), "shop", "", ("job",))
    return ["limits", *command]


async def parked(client: Client, *command: str) -> list[str]:
    record = RunRecord("parked", "default", "job", flow=True, waits="event go, key k")
    await client.runs.put("r1", runs.encode(record), expected=0)
    return ["flows", *command]


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
    ("events", "publish"): (lambda c: queued(c, "publish", "paid", "--id", "e1"), {}),
    ("runs", "cancel"): (lambda c: queued(c, "runs", "cancel", "r1"), {"runs": ("r1",)}),
    ("runs", "retry"): (lambda c: letter(c, "runs", "retry"), {"runs": ("r1",)}),
    ("dead", "replay"): (lambda c: letter(c, "dead", "replay"), {"runs": ("r1",)}),
    ("dead", "drop"): (lambda c: letter(c, "dead", "drop"), {"runs": ("r1",)}),
    ("jobs", "pause"): (lambda c: queued(c, "jobs", "pause", "job"), {"job": "job"}),
    ("jobs", "resume"): (lambda c: queued(c, "jobs", "resume", "job"), {"job": "job"}),
    ("jobs", "purge"): (lambda c: queued(c, "jobs", "purge", "job", "--yes"), {"count": 1}),
    ("flows", "signal"): (
        lambda c: parked(c, "signal", "go", "k", "1"),
        {"detail": "go, key k"},
    ),
    ("flows", "resume"): (lambda c: parked(c, "resume", "r1"), {"runs": ("r1",)}),
    ("limits", "set"): (
        lambda c: limited(c, "set", "db", "--running", "3"),
        {"detail": "db: 3 running"},
    ),
    ("limits", "pause"): (lambda c: limited(c, "pause", "db"), {"detail": "db"}),
    ("limits", "resume"): (lambda c: limited(c, "resume", "db"), {"detail": "db"}),
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
    ("flows", "cancel"): "test_cancel_of_a_flow_leaves_a_line",
    ("schedules", "sync"): "test_sync_leaves_a_line_when_it_changed_something",
    ("nodes", "drain"): "test_drain_leaves_a_line",
    ("agents", "forget"): "test_fleet_actions_leave_a_line_each",
    ("agents", "accept"): "test_joining_actions_leave_a_line_each",
    ("agents", "reject"): "test_joining_actions_leave_a_line_each",
    ("agents", "revoke"): "test_joining_actions_leave_a_line_each",
    ("fleet", "command"): "test_fleet_actions_leave_a_line_each",
    ("fleet", "direct"): "test_fleet_actions_leave_a_line_each",
    ("fleet", "cancel"): "test_fleet_actions_leave_a_line_each",
    ("settings", "push"): "test_settings_actions_leave_a_line_each",
    ("settings", "rollback"): "test_settings_actions_leave_a_line_each",
    ("settings", "canary"): "test_settings_actions_leave_a_line_each",
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


async def test_cancel_of_a_flow_leaves_a_line(app: Holdfast) -> None:
    """A worker has to undo the flow before it is cancelled."""

    @app.flow
    async def sleeper(ctx: Flow) -> None:
        await ctx.sleep("1h")

    async with working(app):
        run = await sleeper.enqueue()

        async def is_parked() -> bool:
            return (await run.status()).state == "parked"

        await until(is_parked)
        async with operating(app) as client:
            ended = await holdfast(app, "flows", "cancel", run.id)
            assert ended.code == 0, ended.err
            assert (await only_line(client, "flows", "cancel")).runs == (run.id,)


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
            straight = ("fleet", "run", "web2", "ping", "--direct", "--id", "f3")
            assert (await holdfast(app, *straight)).code == 0
            await world.agents["web2"].close()
            assert (await holdfast(app, "agents", "forget", "web2")).code == 0
            lines = await Audit(client).actions()
            assert [(one.noun, one.verb, one.runs or one.detail) for one in lines] == [
                ("agents", "forget", "web2"),
                ("fleet", "direct", ("f3",)),
                ("fleet", "cancel", ("f2",)),
                ("fleet", "command", ("f2",)),
                ("fleet", "command", ("f1",)),
            ]


async def test_joining_actions_leave_a_line_each(
    app: Holdfast, nats: Server, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the command line, the API and the page; a host that replaces one needs the word."""
    monkeypatch.chdir(tmp_path)
    async with World(nats, namespace, tmp_path) as world, world.dispatcher():
        bucket = Bucket(world.broker, world.broker.names.joins)
        for n in range(1, 6):
            asked = JoinRecord(b"", f"web{n}", "U", "t1", "pending", 1.0, replaces=n == 4)
            await bucket.put(join_key(asked.agent), JOIN.encode(asked), expected=0)
        listed = await holdfast(app, "agents", "pending")
        assert listed.out.count("pending") == 5
        assert "replaces a known host" in listed.out
        accepted = await holdfast(app, "agents", "accept", "nobody", "web1", "web4")
        assert "web1 is approved" in accepted.out
        assert "no host has asked to be 'nobody'" in accepted.err
        assert "--replace" in accepted.err
        assert accepted.code == 1
        assert "--replace" in (await holdfast(app, "agents", "accept", "web4")).err
        assert (await holdfast(app, "agents", "accept")).code == 1
        assert (await holdfast(app, "agents", "accept", "--follow")).code == 1
        assert (await holdfast(app, "agents", "reject", "web2")).code == 0
        assert (await holdfast(app, "agents", "revoke", "t1")).code == 0
        async with site(nats, namespace) as there:
            shown = (await there.viewer.get("/joins")).json()["items"]
            assert [(one["agent"], one["state"]) for one in shown] == [
                ("web1", "approved"),
                ("web3", "pending"),
                ("web4", "pending"),
                ("web5", "pending"),
            ]
            assert (await there.viewer.post("/joins/web3/accept")).status_code == 403
            assert (await there.admin.post("/joins/web4/accept")).status_code == 422
            assert (await there.admin.post("/joins/web4/accept?replace=true")).is_success
            assert (await there.admin.post("/joins/web5/reject")).is_success
            lines = await Audit(there.client).actions()
        assert [(one.verb, one.detail) for one in lines] == [
            ("reject", "web5 with token t1"),
            ("accept", "web4 with token t1"),
            ("revoke", "token t1"),
            ("reject", "web2 with token t1"),
            ("accept", "web1 with token t1"),
        ]


async def test_page_accepts_the_host_that_it_has_shown(
    nats: Server, namespace: str, tmp_path: Path
) -> None:
    """Not another one, and as one that replaces a known host only if the page says so."""
    async with (
        World(nats, namespace, tmp_path) as world,
        world.dispatcher(),
        site(nats, namespace, with_pages=True) as there,
        there.browser() as browser,
    ):
        bucket = Bucket(world.broker, world.broker.names.joins)
        for agent in ("web1", "web2"):
            asked = JoinRecord(b"", agent, "U", "t1", "pending", 1.0, replaces=agent == "web2")
            await bucket.put(join_key(agent), JOIN.encode(asked), expected=0)
        await log_in(browser, TOKENS["admin"][0])
        browser.headers["accept"] = "text/html"
        given = {"agent": "web1", "fingerprint": fingerprint("U"), "replace": "no"}
        listed = (await browser.get("/fleet")).text
        assert f"agent=web1&amp;fingerprint={fingerprint('U')}&amp;replace=no" in listed
        assert f"agent=web2&amp;fingerprint={fingerprint('U')}&amp;replace=yes" in listed
        page = await browser.get("/do/fleet/accept", params=given)
        assert fingerprint("U") in page.text
        assert "It replaces a host" not in page.text
        page = await browser.get("/do/fleet/accept", params=given | {"replace": "yes"})
        assert "It replaces a host" in page.text
        csrf = await form_token(browser, str(page.url))
        for fields in (given | {"fingerprint": "another"}, given):
            await browser.post("/do/fleet/accept", data=fields | {"csrf": csrf})
            _, entry = await bucket.last(join_key("web1"))
            assert entry is not None
            record = JOIN.decode(entry.value)
            assert record.state == ("approved" if fields == given else "pending")
            assert record.replaces is False


async def _unwell(_: Sequence[str]) -> str:
    return "it does not work"


async def test_settings_actions_leave_a_line_each(
    app: Holdfast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
        (folder / "common.yaml").write_text("db:\n  host: there\n")
        publisher = Publisher(client.broker, Sealer(AccountSeed.load(seed)))
        for words, code in ((["push", str(folder)], 0), (["rollback", "--yes"], 0)):
            ended = await holdfast(app, "settings", *words, "--seed", seed)
            assert ended.code == code, ended.err
        trial = Trial(client.broker, publisher, ["web1"], 0.0, _unwell)
        monkeypatch.setattr(canary, "APPLY_SECONDS", 0.0)
        monkeypatch.setattr(canary, "BACK_SECONDS", 0.0)
        await actions.try_settings(Operator(client), trial, folder)
        lines = await Audit(client).actions()
        assert [(one.noun, one.verb, one.detail) for one in lines] == [
            (
                "settings",
                "canary",
                "revision 5 tried on 1 agent, rolled back: web1 does not have it in force",
            ),
            ("settings", "rollback", "revision 4, back to 2"),
            ("settings", "push", "revision 3"),
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
    "POST /events": (queued, "/events", {"event": "paid", "data": 1}, "publish"),
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
    "POST /flows/signal": (parked, "/flows/signal", {"event": "go", "key": "k"}, "signal"),
    "POST /flows/{run}/resume": (parked, "/flows/r1/resume", None, "resume"),
    "POST /limits/{name}/set": (limited, "/limits/db/set", {"running": 3}, "set"),
    "POST /limits/{name}/pause": (limited, "/limits/db/pause", None, "pause"),
    "POST /limits/{name}/resume": (limited, "/limits/db/resume", None, "resume"),
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
    "POST /flows/{run}/cancel",
    "POST /fleet/runs",
    "POST /fleet/runs/{run}/cancel",
    "DELETE /agents/{agent}",
    "POST /nodes/{node}/drain",
    "POST /joins/{agent}/accept",
    "POST /joins/{agent}/reject",
}
"""Covered by `test_fleet_routes_leave_a_line_each`, `test_joining_actions_leave_a_line_each`;
the last by the same action of the command line."""


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
