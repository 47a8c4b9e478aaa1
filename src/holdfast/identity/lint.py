"""Lint: finds flaws in a server's configuration without a server.

Checks every account and user, also in files written by hand: how they log in, what they may publish
and subscribe to, whether an agent could impersonate another or abuse the server to do so, and
whether traffic is unencrypted. `fail`: users can do something that they should not, or nothing
works; `warn`: it works but may surprise you.

Not checked: an operator's JWTs (the file does not contain their permissions), and whether the
server accepts the file (`nats-server -t`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from holdfast.identity import grants
from holdfast.identity.conf import find, read
from holdfast.identity.grants import covers, overlaps
from holdfast.identity.network import network_flaws
from holdfast.names import Names, kv_stream

Level = Literal["fail", "warn"]

_OTHER: Final = "hf-lint-other"
"""An agent that does not exist: a permission that covers it covers any agent."""
_EVERYTHING: Final = (">", "*.>")
_SECRETS: Final = ("password", "pass", "token")


class Flaw(msgspec.Struct, frozen=True):
    """One flaw, and how to fix it."""

    level: Level
    where: str
    text: str
    todo: str


@dataclass(frozen=True, slots=True)
class Login:
    """One user in the configuration."""

    name: str
    account: str
    streams: bool
    """Whether its account has JetStream."""
    values: Mapping[str, Any]
    permissions: Mapping[str, Any] | None

    def allowed(self, verb: str) -> list[str]:
        """Subjects it may publish or subscribe to; everything if unrestricted."""
        permissions = self.permissions or {}
        found = find(permissions, verb, {"publish": "pub", "subscribe": "sub"}[verb])
        if found is None:
            silent = verb == "publish" and find(permissions, *_RESPONSES) is not None
            return [] if silent else [">"]
        if isinstance(found, Mapping):
            found = find(found, "allow") if find(found, "allow") is not None else [">"]
        return [str(s).split(" ")[0] for s in (found if isinstance(found, list) else [found])]

    @property
    def agent(self) -> bool:
        return any(".agent." in s and not s.endswith(("agent.>", ".*.*")) for s in self._commands())

    @property
    def restores(self) -> bool:
        """Whether it may replace whole streams, and so can do anything."""
        return any("STREAM.RESTORE" in s for s in self.allowed("publish"))

    def _commands(self) -> list[str]:
        return [s for s in self.allowed("subscribe") if s.count(".agent.") == 1]


_RESPONSES: Final = ("allow_responses", "allow_response")


def examine(path: Path, namespace: str) -> list[Flaw]:
    """All flaws of a configuration file and its includes."""
    values = read(path)
    names = Names(namespace)
    found = [Flaw(*parts) for parts in network_flaws(values)]
    found += _anonymous(values)
    logins = list(_logins(values))
    for login in logins:
        found += _login_flaws(login)
        found += _width_flaws(login)
        found += _answer_flaws(login, names)
        if login.agent:
            found += _agent_flaws(login, names)
    found += _repeated(logins)
    return found + list(_exports(values))


def _logins(values: Mapping[str, Any]) -> Iterator[Login]:
    main = find(values, "authorization") or {}
    yield from _users(main, "", bool(find(values, "jetstream")))
    for account, content in (find(values, "accounts") or {}).items():
        if isinstance(content, Mapping):
            yield from _users(content, account, bool(find(content, "jetstream")))


def _name(user: Mapping[str, Any]) -> str:
    """How to refer to a user; never repeats a seed."""
    name = str(find(user, "user", "username") or find(user, "nkey") or "")
    return f"{name[:4]}…" if name.startswith("SU") else name


def _users(content: Mapping[str, Any], account: str, streams: bool) -> Iterator[Login]:
    default = find(content, "default_permissions")
    single = {k: v for k, v in content.items() if k.lower() in ("user", *_SECRETS)}
    users = [*(find(content, "users") or []), *([single] if single else [])]
    for number, user in enumerate(users, 1):
        name = _name(user) or f"number {number}"
        permissions = find(user, "permissions", "permission", "authorization") or default
        yield Login(name, account, streams, user, permissions)


# ---- how they log in


def _anonymous(values: Mapping[str, Any]) -> Iterator[Flaw]:
    everyone = find(values, "no_auth_user")
    if everyone:
        yield Flaw(
            "fail",
            "no_auth_user",
            f"whoever connects without a login is {str(everyone)!r}",
            "remove it: every process has its own login",
        )
    ways = ("authorization", "accounts", "operator", "resolver", "auth_callout")
    if all(not find(values, way) for way in ways):
        yield Flaw(
            "fail",
            "authorization",
            "nobody needs a login: whoever reaches the port may do everything",
            "make users with 'holdfast auth init' and include its auth.conf",
        )


def _login_flaws(login: Login) -> Iterator[Flaw]:
    where = _where(login)
    for key in _SECRETS:
        secret = find(login.values, key)
        if secret is not None and not str(secret).startswith("$2"):
            yield Flaw(
                "fail",
                where,
                f"its {'password' if key != 'token' else 'token'} is in the file as plain text",
                "use an nkey ('holdfast auth user'), or at least a bcrypt hash",
            )
    nkey = str(find(login.values, "nkey") or "")
    if nkey.startswith("S"):
        yield Flaw(
            "fail",
            where,
            "a private key (seed) is in the file",
            "replace it by the public key, which starts with U, of a new login: this one is "
            "compromised",
        )
    elif nkey and not (nkey.startswith("U") and len(nkey) == 56):
        yield Flaw("fail", where, "its nkey is not a user's public key", "it starts with U")


def _repeated(logins: Sequence[Login]) -> Iterator[Flaw]:
    seen: set[str] = set()
    for login in logins:
        if login.name in seen:
            yield Flaw(
                "fail",
                _where(login),
                "is in the file twice: which entry counts is undefined",
                "remove one of them",
            )
        seen.add(login.name)


# ---- what they may do


def _width_flaws(login: Login) -> Iterator[Flaw]:
    where = _where(login)
    if login.permissions is None:
        yield Flaw(
            "fail",
            where,
            "has no permissions, which means all of them",
            "list what it may publish and subscribe to, as 'holdfast auth user' does",
        )
        return
    for verb in ("publish", "subscribe"):
        if any(subject in _EVERYTHING for subject in login.allowed(verb)):
            yield Flaw("fail", where, f"may {verb} to everything (>)", "list what its role needs")
    for subject in login.allowed("publish"):
        if subject.startswith("$JS.API.") and subject in ("$JS.API.>", "$JS.API.STREAM.>"):
            yield Flaw(
                "warn",
                where,
                f"may publish {subject}: it can delete any stream, and have any answer sent "
                "anywhere",
                "list the requests and streams that its role needs",
            )


def _answer_flaws(login: Login, names: Names) -> Iterator[Flaw]:
    if login.permissions is None:
        return
    where = _where(login)
    heard = login.allowed("subscribe")
    inboxes = [s for s in heard if s.startswith("_INBOX")]
    if any(s in ("_INBOX.>", "_INBOX.*", "_INBOX.*.>", "_INBOX.*.*") for s in inboxes):
        yield Flaw(
            "fail",
            where,
            "may subscribe to _INBOX.>: it reads the answers to everybody else",
            "give it its own inbox (_INBOX.core.NAME.>), and set that inbox_prefix for its process",
        )
    elif not inboxes and not any(s in _EVERYTHING for s in heard):
        yield Flaw(
            "fail",
            where,
            "may subscribe to no inbox: no answer ever reaches it",
            "let it subscribe to its own inbox (_INBOX.core.NAME.>)",
        )
    yield from _response_flaws(login, names)
    yield from _reflection_flaws(login)


def _response_flaws(login: Login, names: Names) -> Iterator[Flaw]:
    where, permissions = _where(login), login.permissions or {}
    given = find(permissions, *_RESPONSES)
    if not given:
        asked = any(covers(s, names.node(_OTHER, "ping")) for s in login.allowed("subscribe"))
        if asked and not any(covers(s, "_INBOX.core.x.y") for s in login.allowed("publish")):
            yield Flaw(
                "warn",
                where,
                "receives pings and may not answer them: it will be declared lost",
                'add allow_responses: {max: 1, expires: "30s"}',
            )
        return
    limits = given if isinstance(given, Mapping) else {}
    most = find(limits, "max", "max_msgs", "maxmsgs")
    if isinstance(most, int) and (most < 0 or (login.agent and most > 1)):
        yield Flaw(
            "warn",
            where,
            f"may answer each request {'without limit' if most < 0 else f'{most} times'} "
            "(allow_responses): it can flood a requester",
            'write allow_responses: {max: 1, expires: "30s"}',
        )
    if find(permissions, "publish", "pub") is None:
        yield Flaw(
            "warn",
            where,
            "has allow_responses and no publish list: it may publish nothing but answers",
            "list what it may publish",
        )


def _reflection_flaws(login: Login) -> Iterator[Flaw]:
    """In an account with streams, responses can be directed at a stream or the server's API."""
    asked = [s for s in login.allowed("publish") if s.startswith(("$JS.API.", "$KV."))]
    if login.streams and asked and not login.agent and not login.restores:
        yield Flaw(
            "warn",
            _where(login),
            "is in an account with streams: by naming it as the reply of a request it can write "
            "any key, and delete any stream",
            "let 'holdfast auth' write the accounts: it keeps users and streams in separate ones",
        )


# ---- agents


def _agent_flaws(login: Login, names: Names) -> Iterator[Flaw]:
    where = _where(login)
    other, everyone = _published(names, _OTHER), _published(names, "*")
    common = _published(names, "a") & _published(names, "b")
    for subject in login.allowed("publish"):
        hit = next((s for s in other - common if overlaps(subject, s)), None)
        if hit:
            yield Flaw(
                "fail",
                where,
                f"may publish {subject}: it can speak for other agents ({_with_id(hit)})",
                "replace the wildcard by its own id, as 'holdfast auth agent' does",
            )
        elif not any(covers(s, subject) for s in everyone):
            yield Flaw("fail", where, f"may publish {subject}, which no agent needs", "remove it")
    heard = [names.agent(_OTHER, "exec"), names.node(_OTHER, "ping")]
    heard += [names.changed(names.secrets, _OTHER), f"_INBOX.agents.agent-{_OTHER}.x"]
    for subject in login.allowed("subscribe"):
        hit = next((s for s in heard if covers(subject, s)), None)
        if hit:
            yield Flaw(
                "fail",
                where,
                f"may subscribe to {subject}: it reads what is meant for other agents "
                f"({_with_id(hit)})",
                "replace the wildcard by its own id, as 'holdfast auth agent' does",
            )
    if login.streams:
        yield Flaw(
            "fail",
            where,
            "is an agent in an account with streams: it can have the server's answers written to "
            "any key or queue by naming it as the reply",
            "put agents into an account of their own, as 'holdfast auth init' does",
        )
    secrets = kv_stream(names.secrets)
    for verb in ("STREAM.MSG.GET", "CONSUMER.CREATE"):
        if any(overlaps(s, f"$JS.API.{verb}.{secrets}") for s in login.allowed("publish")):
            yield Flaw(
                "fail",
                where,
                f"may request $JS.API.{verb}.{secrets}: it reads the sealed secrets of all agents",
                "let it read its own key only, by DIRECT.GET with the key in the subject",
            )


def _published(names: Names, id: str) -> set[str]:
    found = grants.agent(names, id)
    return {*found.publish, *found.local}


def _exports(values: Mapping[str, Any]) -> Iterator[Flaw]:
    accounts = find(values, "accounts") or {}
    for account, content in accounts.items():
        for export in (find(content, "exports") or []) if isinstance(content, Mapping) else []:
            subject = str(find(export, "service", "stream"))
            if find(export, "accounts") is None and subject.startswith(("$JS", "$KV", "_INBOX")):
                yield Flaw(
                    "warn",
                    f"account {account}",
                    f"exports {subject} to every account of the server",
                    "list the accounts that may import it",
                )


# ---- texts


def _where(login: Login) -> str:
    account = f"account {login.account}, " if login.account else ""
    return f"{account}user {login.name}"


def _with_id(subject: str) -> str:
    return subject.replace(_OTHER, "<id>")
