"""`holdfast auth` as its users have it: processes, files, and a server that takes the changes."""

from __future__ import annotations

import json
import stat
import subprocess
from pathlib import Path

from holdfast.broker import Broker
from holdfast.config import ConnectionConfig
from holdfast.errors import NotConnected
from holdfast.identity.joining import JoinToken
from tests.integration.cli_support import Ended, clean_environment, run_command
from tests.integration.command import Command
from tests.support import until


async def holdfast(folder: Path, *arguments: str, **env: str) -> Ended:
    """Run a command in a folder."""
    return await run_command(*arguments, env=clean_environment() | env, cwd=folder)


async def test_auth_from_init_to_revoke(tmp_path: Path) -> None:
    """Init, a server, a namespace, agents added and revoked while it runs, and the exit codes."""
    made = await holdfast(tmp_path, "auth", "init", "--namespace", "shop", "--json")
    assert made.code == 0, made.err
    assert len(made.json["credentials"]) == 8
    seed = tmp_path / "auth" / "account.seed"
    assert stat.S_IMODE(seed.stat().st_mode) == 0o600
    assert (await holdfast(tmp_path, "auth", "lint", "auth/nats-server.conf")).code == 0
    folder = await holdfast(tmp_path, "auth", "lint", "auth")
    assert (folder.code, folder.out) == (0, "auth/nats-server.conf: nothing wrong\n")
    other = await holdfast(tmp_path, "auth", "lint", ".")
    assert (other.code, other.err) == (
        1,
        "error: '.' is a folder without nats-server.conf: name a server's configuration file\n",
    )
    again = await holdfast(tmp_path, "auth", "init")
    assert (again.code, "not overwritten" in again.err) == (1, True)

    command = ("server", "--port", "0", "--fast", "--json", "--auth", "auth", "--store", "data")
    with Command(*command, folder=tmp_path, cwd=tmp_path) as server:
        url = json.loads(await until(lambda: _whole(server), 30, "a server"))["url"]

        def file(user: str) -> str:
            return str(tmp_path / "auth" / "credentials" / f"{user}.json")

        async def logs_in(user: str) -> bool:
            config = ConnectionConfig(nats_url=url, namespace="shop", credentials_file=file(user))
            try:
                async with Broker(config):
                    return True
            except NotConnected:
                return False

        env = {"HOLDFAST_NATS_URL": url, "HOLDFAST_NAMESPACE": "shop"}
        nobody = await holdfast(tmp_path, "jobs", "list", **env)
        assert (nobody.code, "refuses the login" in nobody.err) == (1, True)
        login = ("--credentials", file("operator"))
        sent = await holdfast(tmp_path, *login, "enqueue", "resize", "{}", **env)
        assert sent.code == 0, sent.err
        env["HOLDFAST_CREDENTIALS_FILE"] = file("operator")
        doctor = await holdfast(tmp_path, "doctor", "--json", **env)
        found = {one["check"]: one["level"] for one in doctor.json}
        assert (found["login"], found["permissions"]) == ("ok", "ok"), doctor.out

        issued = await holdfast(tmp_path, "auth", "agent", "web1", "web2", "--json")
        assert [Path(path).name for path in issued.json] == ["agent-web1.json", "agent-web2.json"]
        await until(lambda: logs_in("agent-web1"), 20, "web1 known to the server")
        kept = Path(file("agent-web1")).read_bytes()
        revoked = await holdfast(tmp_path, "auth", "revoke", "web1")
        assert (revoked.code, revoked.err) == (
            0,
            f"{url} has taken it: web1 is cut off there\n",
        )
        Path(file("agent-web1")).write_bytes(kept)
        Path(file("agent-web1")).chmod(0o600)
        assert not await logs_in("agent-web1")  # at once: it was said to be in force
        assert await logs_in("agent-web2")

        with (tmp_path / "data" / "nats-server.conf").open("a") as broken:
            broken.write("nonsense {\n")
        late = await holdfast(tmp_path, "auth", "revoke", "web2")
        assert late.code == 1
        assert f"error: {url} has not reloaded: " in late.err
        assert "web2 can still log in there" in late.err

    listed = (await holdfast(tmp_path, "auth", "list", "--json")).json
    assert {u["user"] for u in listed if u.get("revoked")} == {"agent-web1", "agent-web2"}
    nowhere = await holdfast(tmp_path, "auth", "revoke", "worker")
    assert (nowhere.code, "no server has taken it: worker can still log in" in nowhere.err) == (
        1,
        True,
    )
    carried = await holdfast(tmp_path, "auth", "revoke", "web", "--files-only")
    assert (carried.code, "works until the servers have it" in carried.err) == (0, True)
    twice = await holdfast(tmp_path, "auth", "revoke", "web1")
    assert (twice.code, "no user or agent" in twice.err) == (1, True)
    open_conf = tmp_path / "open.conf"
    open_conf.write_text("port: 4222\n")
    flawed = await holdfast(tmp_path, "auth", "lint", "open.conf")
    assert (flawed.code, flawed.out.count("FAIL")) == (1, 2)


async def test_tokens_are_listed_where_they_were_made(tmp_path: Path) -> None:
    """Their ids and what they allow, never the tokens; the servers' certificates travel in them."""
    assert (await holdfast(tmp_path, "auth", "init")).code == 0
    ca = tmp_path / "ca.pem"
    words = ("auth", "token", "web*", "--uses", "0", "--ca", "ca.pem", "--json")
    ca.write_text("no certificate")
    assert "has no certificates" in (await holdfast(tmp_path, *words)).err
    make = ("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    files = ("-subj", "/CN=ca", "-keyout", str(tmp_path / "key"), "-out", str(ca))
    subprocess.run(["openssl", *make, *files], check=True, capture_output=True)
    made = (await holdfast(tmp_path, *words)).json
    assert JoinToken.read(made["token"]).ca == ca.read_text()
    listed = await holdfast(tmp_path, "auth", "tokens")
    assert made["id"] in listed.out
    assert "web*" in listed.out
    assert made["token"] not in listed.out


async def test_auth_agent_finds_the_generation(tmp_path: Path) -> None:
    """What was issued, or is configured for the dispatchers, is the newest for those who follow."""

    async def issued(agent: str, *words: str, **env: str) -> list[str]:
        ended = await holdfast(tmp_path, "auth", "agent", agent, *words, **env)
        assert ended.code == 0, ended.err
        file = tmp_path / "auth" / "credentials" / f"agent-{agent}.json"
        return sorted(json.loads(file.read_text())["keys"]["verify"])

    assert (await holdfast(tmp_path, "auth", "init")).code == 0
    assert await issued("a") == ["1"]
    assert await issued("b", "--generation", "2") == ["1", "2"]
    assert await issued("c") == ["1", "2"]
    assert await issued("d", HOLDFAST_DISPATCHER_GENERATION="3") == ["2", "3"]
    assert await issued("e") == ["2", "3"]
    assert (await holdfast(tmp_path, "auth", "revoke", "a", "--files-only")).code == 0
    assert await issued("a") == ["2", "3"]


def _whole(server: Command) -> str:
    text = server.text
    return text[text.index("{") : text.rindex("}") + 1] if "}" in text else ""


async def test_host_joins_with_one_command_there_and_one_at_the_centre(tmp_path: Path) -> None:
    """Real processes: a token, a host that asks, an operator who accepts, a ping that answers."""
    assert (await holdfast(tmp_path, "auth", "init")).code == 0
    for useless in (("",), ("web*", "--expires", "0s")):
        assert (await holdfast(tmp_path, "auth", "token", *useless)).code == 1
    made = await holdfast(tmp_path, "auth", "token", "web*", "--json")
    wide = await holdfast(tmp_path, "auth", "token", "db*", "--uses", "0", "--accept", "--json")

    def login(user: str) -> str:
        return str(tmp_path / "auth" / "credentials" / f"{user}.json")

    command = ("server", "--port", "0", "--fast", "--json", "--auth", "auth", "--store", "data")
    with Command(*command, folder=tmp_path, cwd=tmp_path) as server:
        url = json.loads(await until(lambda: _whole(server), 30, "a server"))["url"]
        at = {"HOLDFAST_NATS_URL": url}
        centre = at | {"HOLDFAST_CREDENTIALS_FILE": login("operator")}
        control = at | {"HOLDFAST_CREDENTIALS_FILE": login("control")}
        seed = ("--seed", "auth/account.seed")
        host = ("agent", "--join", made.json["token"], "--id", "web7")
        second = ("agent", "--join", wide.json["token"], "--id", "db7")
        with (
            Command("control", *seed, folder=tmp_path, cwd=tmp_path, env=control) as started,
            Command(*host, folder=tmp_path, cwd=tmp_path, env=at) as web7,
        ):
            await started.says("dispatching")
            await web7.says("web7 is pending")
            accepted = await holdfast(tmp_path, "agents", "accept", "--all", **centre)
            assert (accepted.code, accepted.out[:4]) == (0, "web7"), accepted.err
            await web7.says("agent web7 takes commands")
            pinged = await holdfast(tmp_path, "fleet", "run", "web7", "ping", **centre)
            assert (pinged.code, pinged.out) == (0, "web7  ok  true\n")
            follow = ("agents", "accept", "--follow")
            with (
                Command(*follow, folder=tmp_path, cwd=tmp_path, env=centre),
                Command(*second, folder=tmp_path, cwd=tmp_path, env=at) as db7,
            ):
                await db7.says("agent db7 takes commands")
            stolen = ("agent", "--join", made.json["token"], "--id", "web8")
            with Command(*stolen, folder=tmp_path, cwd=tmp_path, env=at) as web8:
                assert await web8.ended() == 1
                assert "the token has been used" in web8.text
