"""`holdfast fleet`, `agents`, `agent` and `dispatcher` as an operator has them."""

from __future__ import annotations

import asyncio
import signal
import sys
from asyncio.subprocess import PIPE, STDOUT
from pathlib import Path

import yaml

from holdfast import Holdfast
from holdfast.identity.seed import AccountSeed
from holdfast.server import Server
from tests.fleet_world import World
from tests.integration.cli_support import environment, holdfast
from tests.integration.command import Command, free_port
from tests.support import until


async def test_fleet_run_exit_codes_and_formats(
    app: Holdfast, nats: Server, namespace: str, tmp_path: Path
) -> None:
    """0 all fine, 1 not sent, 2 failed, 3 silent, 4 both; lines, or one JSON object."""
    quick = {"ack_seconds": 0.2, "grace_seconds": 0.2}
    async with World(nats, namespace, tmp_path) as world, world.dispatcher(**quick):
        await world.start_agents("web1", "web2")
        fine, refused, failed, silent, both, typo, option, listed, other = await asyncio.gather(
            holdfast(app, "fleet", "run", "web*", "ping"),
            holdfast(app, "fleet", "run", "none*", "ping"),
            holdfast(app, "fleet", "run", "web1", "fail", "--format", "json"),
            holdfast(app, "fleet", "run", "L@web1,ghost", "ping"),
            holdfast(app, "fleet", "run", "L@web1,ghost", "fail", "--json"),
            holdfast(app, "fleet", "run", "web1 web2", "ping"),
            holdfast(app, "fleet", "run", "web1", "cmd.run", "ls", "-l"),
            holdfast(app, "fleet", "run", "web*", "ping", "--format", "yaml", "--id", "y1"),
            holdfast(app, "fleet", "run", "web1", "ping", "--format", "toml"),
        )
        assert (fine.code, sorted(fine.out.splitlines())) == (
            0,
            ["web1  ok  true", "web2  ok  true"],
        )
        assert "complete, 2 ok, 0 failed, 0 unreachable of 2" in fine.err
        assert (refused.code, refused.out) == (1, "")
        assert "no agent matches" in refused.err
        assert failed.code == 2
        assert failed.json["status"] == "failed"
        assert failed.json["returns"]["web1"]["outcome"] == "failed"
        assert silent.code == 3
        assert "ghost  unreachable" in silent.out
        assert (both.code, both.json["unreachable"]) == (4, ["ghost"])
        assert typo.code == 1
        assert option.code == 1  # nothing was sent: 2 would say that an agent failed
        assert "put -- before arguments that begin with a dash" in option.err
        told = yaml.safe_load(listed.out)
        assert (listed.code, told["status"], told["returns"]["web2"]["value"]) == (
            0,
            "complete",
            True,
        )
        assert (other.code, "is not one of 'text', 'json', 'yaml'" in other.err) == (1, True)
        shown = await holdfast(app, "fleet", "show", "y1", "--format", "yaml")
        assert yaml.safe_load(shown.out)["targets"] == ["web1", "web2"]


async def test_refusal_is_told_from_silence(
    app: Holdfast, nats: Server, namespace: str, tmp_path: Path
) -> None:
    """An agent that does not trust the dispatcher is shown as refusing, and why; ghosts are not."""
    file, other = tmp_path / "account.seed", tmp_path / "other.seed"
    seed = AccountSeed.create(file)
    AccountSeed.create(other)
    quick = {"ack_seconds": 0.2, "grace_seconds": 0.2}
    words = ("fleet", "run", "L@web1,ghost", "mark", "x")
    async with World(nats, namespace, tmp_path) as world:
        for config, word, why in (
            ({"seed_file": str(file), "generation": 2}, "foreign", "older than the dispatchers'"),
            ({}, "unsigned", "carries no signature"),
            ({"seed_file": str(other)}, "unverified", "belong to different accounts"),
        ):
            async with world.dispatcher(**quick, **config):
                if not world.agents:
                    await world.start_agent("web1", seed.issue("web1"))
                ended = await holdfast(app, *words, "--id", word)
                shown = await holdfast(app, "fleet", "show", word, "--json")
            assert ended.code == 3, ended.err
            silent, refused = ended.out.splitlines()
            assert silent == "ghost  unreachable"
            assert refused.startswith("web1  refused  ")
            assert why in refused
            assert "0 ok, 0 failed, 1 unreachable, 1 refused of 2" in ended.err
            assert shown.json["refused"] == {"web1": word}
            assert shown.json["unreachable"] == ["ghost", "web1"]
        assert world.effects.of("x") == {}


async def test_fleet_detach_show_list_cancel(
    app: Holdfast, nats: Server, namespace: str, tmp_path: Path
) -> None:
    """A detached run is listed as active, shown, cancelled, and kept with its story."""
    async with World(nats, namespace, tmp_path) as world, world.dispatcher():
        await world.start_agents("web1")
        started = await holdfast(app, "fleet", "run", "web1", "mark", "x", "60", "--detach")
        run = started.out.strip()
        assert started.code == 0
        active = await holdfast(app, "fleet", "active", "--json")
        assert [r["run"] for r in active.json] == [run]
        cancelled = await holdfast(app, "fleet", "cancel", run)
        assert cancelled.code == 0
        await world.followed(run)
        shown, listed, gone, left, unknown = await asyncio.gather(
            holdfast(app, "fleet", "show", run),
            holdfast(app, "fleet", "list"),
            holdfast(app, "fleet", "show", "fNobody"),
            holdfast(app, "fleet", "active", "--json"),
            holdfast(app, "fleet", "list", "--status", "done"),
        )
        for step in ("dispatched", "cancelled", "ended"):
            assert step in shown.out
        assert run in listed.out
        assert gone.code == 1
        assert "fan-out run fNobody does not exist" in gone.err
        assert left.json == []
        assert unknown.code == 1
        assert "status 'done' is not one of claimed, running, complete" in unknown.err


async def test_fleet_run_interrupted_says_that_the_run_goes_on(
    app: Holdfast, nats: Server, namespace: str, tmp_path: Path
) -> None:
    """Ctrl-C stops watching, not the run, and says how to stop that too."""
    async with World(nats, namespace, tmp_path) as world, world.dispatcher():
        await world.start_agents("web1")
        words = ("fleet", "run", "web1", "mark", "x", "60", "--id", "long")
        with Command(*words, folder=tmp_path, env=environment(app)) as watching:
            await watching.says("long: mark for 1 agent\n")
            watching.signal(signal.SIGINT)
            assert await watching.ended() == 130
            await watching.says("long continues: 'holdfast fleet cancel long' stops it")
        active = await holdfast(app, "fleet", "active", "--json")
        assert [r["run"] for r in active.json] == ["long"]


async def test_roles_started_before_nats_say_so_and_end(tmp_path: Path) -> None:
    """Every role but an agent: one line, exit code 1, so that whoever started it does so again."""
    env = {
        "HOLDFAST_NATS_URL": f"nats://127.0.0.1:{free_port()}",
        "HOLDFAST_CONNECT_TIMEOUT_SECONDS": "0.5",
    }
    shop = "examples.shop:app"
    roles = (["dispatcher"], ["coordinator"], ["control"])
    for words in (*roles, ["scheduler", shop], ["worker", shop]):
        with Command(*words, folder=tmp_path, env=env) as role:
            assert await role.ended() == 1, words
            assert role.text.count("\n") == 1, role.text
            assert "cannot reach NATS at" in role.text


async def test_agent_waits_for_nats_as_long_as_it_may(tmp_path: Path) -> None:
    """With a longer time to connect it goes on trying, and takes up work when NATS is there."""
    port, tried = free_port(), asyncio.Event()

    async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()
        tried.set()

    env = {
        "HOLDFAST_NATS_URL": f"nats://127.0.0.1:{port}",
        "HOLDFAST_CONNECT_TIMEOUT_SECONDS": "120",
    }
    words = ("agent", "--id", "a1", "--data", str(tmp_path / "data"))
    nobody = await asyncio.start_server(hang_up, "127.0.0.1", port)
    with Command(*words, folder=tmp_path, env=env) as agent:
        async with nobody:
            await asyncio.wait_for(tried.wait(), 40)
        with Server(port, fast=True):
            await agent.says("waiting for a dispatcher")
            agent.signal(signal.SIGTERM)
            assert await agent.ended() == 0


async def test_agent_without_its_facts_file_does_not_start(app: Holdfast, tmp_path: Path) -> None:
    """A path that was given and is not there is a mistake, told before anything else."""
    ended = await holdfast(app, "agent", "--id", "a1", "--facts", str(tmp_path / "gone.yaml"))
    assert (ended.code, ended.out) == (1, "")
    assert "gone.yaml' does not exist: write it" in ended.err


async def test_agent_and_dispatcher_out_of_the_box(app: Holdfast, tmp_path: Path) -> None:
    """On an open server: control, an agent, a command; the agent says that it obeys anybody."""
    env = environment(app)
    data = str(tmp_path / "data")
    with (
        Command("agent", "--id", "a1", "--data", data, folder=tmp_path, env=env) as agent,
        Command("control", folder=tmp_path, env=env) as control,
    ):
        await until(lambda: "takes commands" in agent.text, 30, "an agent")
        assert agent.text.count("obeys whoever") == 1
        done, refused, listed, shown, settings = await asyncio.gather(
            holdfast(app, "fleet", "run", "*", "facts.get", "id"),
            holdfast(app, "fleet", "run", "a1", "cmd.run", "id"),
            holdfast(app, "agents", "list", "--json"),
            holdfast(app, "agents", "show", "a1"),
            holdfast(app, "settings", "get", "a1"),
        )
        assert (done.code, done.out) == (0, "a1  ok  a1\n")
        assert refused.code == 2
        assert "no function 'cmd.run' (it was started without --allow-commands)" in refused.out
        assert settings.code == 1
        assert "this agent has no credentials, so it receives no settings" in settings.err
        assert [(a["id"], a["online"]) for a in listed.json] == [("a1", True)]
        assert "fact: os" in shown.out
        for command in (agent, control):
            command.process.terminate()
            await until(lambda c=command: c.process.poll() is not None, 20, "an end")
            assert command.process.returncode == 0, command.text
        listed = await holdfast(app, "agents", "list", "--json")
        assert [(a["id"], a["online"]) for a in listed.json] == [("a1", False)]


async def test_agent_on_a_full_disk_says_what_to_do(app: Holdfast, tmp_path: Path) -> None:
    """An agent that cannot write its journal ends with one sentence, not with a bug report."""
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "runs.jsonl").write_text('{"run":"f1","epoch":1,"state":"sent"}\n')
    command = f"ulimit -f 0; exec {sys.executable} -m holdfast agent --id web1 --data {folder}"
    process = await asyncio.create_subprocess_exec(
        "sh", "-c", command, env=environment(app), stdout=PIPE, stderr=STDOUT
    )
    out, _ = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 1
    assert "cannot be used: File too large. Free space" in out.decode()
    assert "bug" not in out.decode()


async def test_fleet_run_is_rehearsed(
    app: Holdfast, nats: Server, namespace: str, tmp_path: Path
) -> None:
    """Each agent says what it would do and change, and does nothing; wrong arguments show."""
    async with World(nats, namespace, tmp_path) as world, world.dispatcher():
        await world.start_agents("web1", "web2")
        fact = await holdfast(
            app, "fleet", "run", "web*", "facts.set", "role", "edge", "--test", "--json"
        )
        assert fact.code == 0, fact.err
        assert {a: r["value"]["changes"] for a, r in fact.json["returns"].items()} == {
            agent: [{"fact": "role", "from": None, "to": "edge"}] for agent in ("web1", "web2")
        }
        silent = await holdfast(app, "fleet", "run", "web1", "mark", "x", "--test", "--json")
        assert "does not say" in silent.json["returns"]["web1"]["value"]["note"]
        reads = await holdfast(app, "fleet", "run", "web1", "ping", "--test", "--json")
        assert reads.json["returns"]["web1"]["value"]["changes"] == []
        wrong = await holdfast(app, "fleet", "run", "web1", "mark", "--test")
        assert (wrong.code, "missing a required argument" in wrong.out) == (2, True)
        assert world.effects == []
        assert world.agents["web1"].facts.get("role") is None


async def test_fleet_without_a_dispatcher(
    app: Holdfast, nats: Server, namespace: str, tmp_path: Path
) -> None:
    """A target is looked up in the buckets; one agent is commanded directly, once."""
    async with World(nats, namespace, tmp_path) as world:
        async with world.dispatcher():
            await world.start_agents("web1", "web2")
        found = await holdfast(app, "fleet", "resolve", "web*", "--json")
        assert found.json == ["web1", "web2"]
        assert "no dispatcher is running" in found.err
        words = ("fleet", "run", "web1", "mark", "now", "--direct", "--id", "d1")
        first, again = await holdfast(app, *words), await holdfast(app, *words)
        assert (first.code, first.out) == (0, "web1  ok  web1:now\n")
        assert (again.code, again.out) == (0, "web1  ok  web1:now\n")
        assert world.effects.of("now") == {"web1": 1}
        ghost = await holdfast(app, "fleet", "run", "ghost", "ping", "--direct")
        assert (ghost.code, "not connected" in ghost.out) == (2, True)
        many = await holdfast(app, "fleet", "run", "web*", "ping", "--direct")
        assert many.code == 1
        async with world.dispatcher():
            live = await holdfast(app, "fleet", "resolve", "web1", "--json")
            assert (live.json, live.err) == (["web1"], "")


async def test_history_of_a_fleet_run_says_who_answered(
    app: Holdfast, nats: Server, namespace: str, tmp_path: Path
) -> None:
    """Dispatched, acked, returned, ended; meanwhile the dispatcher's heartbeat names the run."""
    quick = {"ack_seconds": 0.2, "grace_seconds": 0.2}
    async with World(nats, namespace, tmp_path) as world, world.dispatcher(**quick) as one:
        await world.start_agents("web1", "web2")
        request = world.request("L@web1,web2,ghost", "look", "slow", 2.0, run="h1")
        await world.fleet.start(request)
        await one.member.heartbeat.beat()
        shown = await holdfast(app, "nodes", "show", one.node, "--json")
        assert shown.json["node"]["runs"] == ["h1"]
        await world.followed("h1")
        told = await holdfast(app, "fleet", "show", "h1", "--json")
        steps = [(step["what"], step.get("detail", "")) for step in told.json["history"]]
        assert [what for what, _ in steps] == ["dispatched", "sent", "acked", "returned", "ended"]
        assert steps[1][1].startswith("3 commands in")
        assert steps[2][1] == "2 of 3 agents"
        assert steps[3][1] == "2 of 3 returned, 2 ok"
