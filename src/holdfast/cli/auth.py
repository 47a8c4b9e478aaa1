"""`holdfast auth`: who may log in to the server, and as what."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli import out
from holdfast.cli.command import command
from holdfast.cli.options import argument, connection_given, option
from holdfast.cli.reloading import send_reload

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.identity.lint import Flaw
    from holdfast.identity.users import UserFolder

FOLDER = Path("auth")
TAKE_SECONDS = 15.0
"""How long to wait for servers to reload. They notice a change within a second; the rest is for
busy machines."""
MARKS = {"fail": "FAIL", "warn": "WARN"}

DirOption = Annotated[Path, option("Folder of 'holdfast auth init'.", "DIR", file_okay=False)]
PidOption = Annotated[
    Path | None,
    option("Pid file of a nats-server on this machine, to make it reload the change now.", "FILE"),
]
SHORTEST_LIFE = 3600.0
"""The shortest life of a login, in seconds: a third of it must suffice to reload all servers."""


@command("auth init")
def init(
    path: Annotated[Path, option("Folder to make.", "DIR", "--out", file_okay=False)] = FOLDER,
) -> None:
    """Make the account seed, a login for each role, and the server's configuration.

    Nothing that exists is overwritten. The namespace is the one of --namespace.
    """
    folder = _folder(path)
    made = [str(file) for file in folder.init(_namespace())]
    if out.as_json({"folder": str(path), "config": str(folder.config), "credentials": made}):
        return
    out.say(f"{path}/account.seed   the root of every key: for dispatchers, and a safe place")
    out.say(f"{path}/auth.conf      accounts and permissions: include it, as nats-server.conf does")
    out.lines(made)
    out.note(
        f"start a server with 'holdfast server --auth {path}', and each process with "
        f"HOLDFAST_CREDENTIALS_FILE set to its file in {path}/credentials"
    )


def _namespace() -> str:
    from holdfast.config import ConnectionConfig, load

    return load(ConnectionConfig, **connection_given()).namespace


@command("auth agent")
def agent(
    ids: Annotated[list[str], argument("Ids of the agents.", "ID...")],
    dir: DirOption = FOLDER,
    generation: Annotated[
        int | None, option("Newest generation of keys; defaults to the one in use.", min=1)
    ] = None,
    only: Annotated[
        bool, option("Without the previous generation, whose commands are then refused.")
    ] = False,
    pid_file: PidOption = None,
) -> None:
    """Issue the credentials of agents: only their own keys, and the public ones they need.

    They hold the newest generation of keys and the one before. The newest is the one that was
    issued last from this folder or rotated to by 'holdfast secrets rotate', or the dispatchers' in
    the configuration.
    """
    from holdfast.config import DispatcherConfig, load

    folder = _folder(dir)
    newest = generation or max(folder.generation, load(DispatcherConfig).generation)
    oldest = newest if only else max(1, newest - 1)
    made = folder.add_agents(ids, range(oldest, newest + 1))
    if newest > 1:
        out.note(f"with keys of generation{'' if only else f's {oldest} and'} {newest}")
    _issued(made, folder, pid_file)


@command("auth user")
def user(
    role: Annotated[str, argument("worker, client, operator, …", "ROLE")],
    name: Annotated[str, option("Name of the login, if a role has several.", "NAME")] = "",
    bucket: Annotated[
        list[str] | None, option("A bucket (app.bucket) that it may use; may be repeated.", "NAME")
    ] = None,
    dir: DirOption = FOLDER,
    pid_file: PidOption = None,
) -> None:
    """Issue a login of a role."""
    folder = _folder(dir)
    _issued([folder.add_user(role, name, bucket or ())], folder, pid_file)


@command("auth token")
def token(
    pattern: Annotated[str, argument("Which agent ids may join: 'web*', db1.", "PATTERN")],
    uses: Annotated[int, option("How many hosts may use it; 0: any number.", "N", min=0)] = 1,
    expires: Annotated[str, option("How long the token is valid.", "TIME")] = "1h",
    accept: Annotated[bool, option("Accept new hosts without asking.")] = False,
    lasts: Annotated[str, option("Logins end after TIME unless agents renew them.", "TIME")] = "",
    url: Annotated[str, option("Where hosts reach the servers.", "URL")] = "",
    ca: Annotated[
        Path | None, option("Certificates to verify the servers with, if hosts lack them.", "FILE")
    ] = None,
    dir: DirOption = FOLDER,
    pid_file: PidOption = None,
) -> None:
    """Make a token with which hosts become agents: 'holdfast agent --join TOKEN'.

    It is shown once. Whoever has it can ask to be an agent that the pattern allows, and nothing
    else. 'holdfast auth tokens' lists tokens, 'holdfast agents revoke ID' revokes one. With
    --lasts, agents ask for their next login when half to a third of the time is left: let 'holdfast
    agents accept --follow' run beside the folder.
    """
    import time

    from holdfast.durations import seconds
    from holdfast.errors import InvalidInput
    from holdfast.identity.joining import make_token
    from holdfast.identity.users import IssuedToken

    now, life = time.time(), seconds(expires, "expires")
    if not pattern or life <= 0:
        raise InvalidInput("a token needs a pattern of ids and some time: nobody could use it")
    folder = _folder(dir)
    first = not any(u.role == "join" and not u.revoked for u in folder.users())
    newest = folder.generation
    made = make_token(
        folder.seed(),
        folder.names.namespace,
        pattern,
        expires=now + life,
        uses=uses,
        accept=accept,
        lasts=_life(lasts),
        login=folder.join_login(),
        generations=range(max(1, newest - 1), newest + 1),
        url=url,
        ca=_certificates(ca),
    )
    allows = made.allows
    folder.add_token(
        IssuedToken(allows.id, pattern, allows.expires, uses, accept, allows.lasts), now
    )
    if not out.as_json({"id": made.allows.id, "pattern": pattern, "token": made.text()}):
        out.note(f"token {made.allows.id}, for {pattern}")
        out.block(made.text())
    if first:
        _reload(folder, pid_file)


@command("auth tokens")
def list_tokens(dir: DirOption = FOLDER) -> None:
    """List tokens that were made in this folder; those that expired a week ago are dropped."""
    import time

    now = time.time()
    out.listing(
        _folder(dir).tokens(),
        ("token", lambda token: token.id),
        "pattern",
        ("uses", lambda token: str(token.uses or "any")),
        (
            "expires",
            lambda token: "expired" if token.expires < now else out.clock_time(token.expires),
        ),
        ("accepts", lambda token: "by itself" if token.accept else "an operator"),
        ("made", lambda token: token.made[:19]),
        empty="no token was made here: 'holdfast auth token' makes one",
    )


def _certificates(ca: Path | None) -> str:
    import ssl

    from holdfast.errors import ConfigError

    if ca is None:
        return ""
    try:
        text = ca.read_text(encoding="ascii")
        ssl.create_default_context(cadata=text)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{str(ca)!r} has no certificates in PEM: {error}") from None
    return text


def _life(lasts: str) -> float:
    """Life of a login in seconds; 0 if it does not end."""
    from holdfast.durations import seconds
    from holdfast.errors import InvalidInput

    found = seconds(lasts, "lasts") if lasts else 0.0
    if lasts and found < SHORTEST_LIFE:
        raise InvalidInput("--lasts must be at least an hour: an agent may be switched off for one")
    return found


@command("auth revoke")
def revoke(
    name: Annotated[str, argument("An agent's id, or a user's name.", "ID")],
    dir: DirOption = FOLDER,
    pid_file: PidOption = None,
    files_only: Annotated[
        bool, option("Only change the folder; you copy it to the servers yourself.")
    ] = False,
) -> None:
    """Revoke a login; its connections are cut when the server reloads.

    Exit codes: 0 when every known server has reloaded or was told to, 1 when one has not or none is
    known: then the login still works there.
    """
    folder = _folder(dir)
    gone = folder.revoke(name)
    if not out.as_json(gone):
        out.lines(f"revoked {one.user} ({one.nkey})" for one in gone)
    if files_only:
        out.note(
            f"{folder.config} has changed: the login works until the servers have it and reload"
        )
    elif not _in_force(folder, pid_file, name):
        raise typer.Exit(1)


@command("auth renew")
def renew(
    files: Annotated[
        list[Path] | None, argument("Credentials files outside the folder.", "FILE...")
    ] = None,
    dir: DirOption = FOLDER,
    pid_file: PidOption = None,
) -> None:
    """Rewrite accounts, permissions and the logins' certificates for this version.

    Run it after an upgrade of Holdfast and after a rotation of keys, then copy the credentials
    files to their processes. Logins stay valid. 'holdfast server --auth' reloads by itself; other
    servers need two reloads, or a restart, on every node.
    """
    folder = _folder(dir)
    renewed, absent = folder.renew(files or ())
    told = {"config": str(folder.config), "renewed": [*map(str, renewed)], "absent": absent}
    if not out.as_json(told):
        out.lines([folder.config, *renewed])
    if absent:
        out.note(
            f"no file of {', '.join(absent)} is here: name it as FILE, or revoke the login and "
            "issue another; until then what it asks of others is not signed"
        )
    _reload(folder, pid_file)


def _in_force(folder: UserFolder, pid_file: Path | None, name: str) -> bool:
    """Whether the servers have dropped that user; prints what is left to do."""
    from holdfast.identity.takers import wait_taken

    used, not_used = wait_taken(folder.config, TAKE_SECONDS)
    for one in used:
        out.note(f"{one.server} has taken it: {name} is cut off there")
    for one in not_used:
        out.note(
            f"error: {one.server} has not reloaded: {one.error or 'it does not watch the file'}"
        )
    if pid_file is not None:
        send_reload(folder.config, pid_file)
        out.note(
            f"the server of {pid_file} was told to reload: it has taken it when its log says "
            "'Reloaded server configuration'"
        )
    elif not used and not not_used:
        out.note(
            f"error: no server has taken it: {name} can still log in. No 'holdfast server --auth "
            f"{folder.path}' runs on this machine. Reload your servers, on every node: "
            "'nats-server --signal reload=PID'. Next time name one with --pid-file, or say "
            "--files-only when you carry the folder to them yourself"
        )
        return False
    if not_used:
        out.note(f"error: {name} can still log in there: restart that server, or look at its log")
    return not not_used


@command("auth list")
def list_users(dir: DirOption = FOLDER) -> None:
    """List users, including revoked ones."""
    found = _folder(dir).users()
    out.listing(
        found,
        "user",
        "role",
        ("public key", lambda user: user.nkey),
        ("issued", lambda user: user.issued[:19]),
        ("revoked", lambda user: user.revoked[:19]),
    )


@command("auth lint")
def lint(
    file: Annotated[Path, argument("A server's configuration, or the folder that has it.", "FILE")],
) -> None:
    """Check a server's configuration without a server.

    In a folder it checks nats-server.conf and the files that this includes. Exit codes: 0 when
    nothing is wrong (warnings are allowed), 1 when something is.
    """
    from holdfast.identity.lint import examine

    file = _configuration(file)
    found = examine(file, _namespace())
    if not out.as_json(found):
        _show(found, file)
    raise typer.Exit(1 if any(flaw.level == "fail" for flaw in found) else 0)


def _configuration(path: Path) -> Path:
    """The file to check; in a folder, the one a server is started with."""
    from holdfast.errors import ConfigError
    from holdfast.identity.users import EXAMPLE

    if not path.is_dir():
        return path
    if (path / EXAMPLE).is_file():
        return path / EXAMPLE
    others = sorted(str(one) for one in path.glob("*.conf"))
    todo = f", such as {others[0]}" if others else ""
    raise ConfigError(
        f"{str(path)!r} is a folder without {EXAMPLE}: name a server's configuration file{todo}"
    )


def _show(found: Sequence[Flaw], file: Path) -> None:
    for flaw in found:
        out.say(f"{MARKS[flaw.level]}  {flaw.where}: {flaw.text}")
        out.say(f"      -> {flaw.todo}")
    if not found:
        out.say(f"{file}: nothing wrong")


def _folder(path: Path) -> UserFolder:
    import time

    from holdfast.clock import rfc3339
    from holdfast.identity.users import UserFolder

    return UserFolder(path, now=rfc3339(time.time()))


def _issued(made: Sequence[Path], folder: UserFolder, pid_file: Path | None) -> None:
    out.lines(made)
    _reload(folder, pid_file)


def _reload(folder: UserFolder, pid_file: Path | None) -> None:
    """Make a server reload its configuration, or say how to."""
    if pid_file is None:
        out.note(
            f"{folder.config} has changed: 'holdfast server --auth' takes it by itself, others "
            "with 'nats-server --signal reload=PID', on every node"
        )
    else:
        send_reload(folder.config, pid_file)
