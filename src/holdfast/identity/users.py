"""The users of a server: a folder that lists them, and the configuration generated from it.

    account.seed       the root of every key: dispatchers need it, nobody else
    users.json         every user: name, role, public key, when issued, when revoked; the newest
                       generation of keys
    auth.conf          accounts and permissions, generated from users.json; included by the server
    nats-server.conf   an example around it, written once and then yours
    credentials/       issued logins, one private file per user: move it to its process

Guaranteed: files are replaced atomically; `auth.conf` always matches `users.json`; concurrent
commands wait for each other. A revoked user stays in the list but in no configuration. Users'
private keys are in `credentials/` only: remove a file once it is deployed.

A running server applies a change when it reloads its configuration; `holdfast server --auth` does
so automatically. A revoked user's connections are then cut.
"""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from holdfast import names as wire
from holdfast.errors import ConfigError, InvalidInput
from holdfast.identity.credentials import (
    AGENT,
    AgentCredentials,
    Credentials,
    agent_user,
    new_nkey_seed,
)
from holdfast.identity.files import read_private, write_private
from holdfast.identity.grants import ISSUED_LATER, ROLES
from holdfast.identity.rendering import render_accounts, render_server
from holdfast.identity.renewing import Renewal
from holdfast.identity.seed import FIRST_GENERATION, AccountSeed
from holdfast.names import Names

SEED: Final = "account.seed"
USERS: Final = "users.json"
CONFIG: Final = "auth.conf"
EXAMPLE: Final = "nats-server.conf"
CREDENTIALS: Final = "credentials"
KEPT_SECONDS: Final = 7 * 86_400.0
"""How long ended logins and expired tokens stay in the list. It must not grow: ten thousand agents
with logins of 30 days renew about 600 a day, and every change rewrites the whole list."""
_TAKEN: Final = "the login that {} asks for belongs to another user or is revoked"


class NatsUser(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One user of the server."""

    user: str
    role: str
    nkey: str
    """The public half of its login."""
    agent: str = ""
    buckets: tuple[str, ...] = ()
    """Programs' buckets it may use."""
    issued: str = ""
    revoked: str = ""
    ends: float = 0.0
    """When it ends unless the agent renews it, in seconds since 1970; 0: never."""
    lasts: float = 0.0
    """How long a renewed login lasts."""
    renews: str = ""
    """The public half of the login that this one follows."""


class JoinedLogin(msgspec.Struct, frozen=True):
    """A login that a host has made for itself."""

    agent: str
    nkey: str
    replace: bool = False
    """Whether it may replace a known host."""
    ends: float = 0.0
    lasts: float = 0.0


class IssuedToken(msgspec.Struct, frozen=True):
    """A token that was made here, without its secrets: nobody can join with this."""

    id: str
    pattern: str
    expires: float
    uses: int
    accept: bool = False
    lasts: float = 0.0
    made: str = ""


class _List(msgspec.Struct, frozen=True, kw_only=True):
    namespace: str
    users: list[NatsUser]
    tokens: list[IssuedToken] = []
    generation: int = FIRST_GENERATION
    """The newest generation of keys issued, or rotated to."""


class UserFolder:
    """The folder of `holdfast auth`; `now` is the time to record, in RFC 3339."""

    def __init__(self, path: str | Path, *, now: str = "") -> None:
        self.path = Path(path)
        self._now = now

    @property
    def config(self) -> Path:
        """The file a server includes."""
        return self.path / CONFIG

    # ---- reading

    def seed(self) -> AccountSeed:
        """The root of every key."""
        return AccountSeed.load(self.path / SEED)

    def users(self) -> list[NatsUser]:
        """All users, including revoked ones."""
        return self._read().users

    @property
    def generation(self) -> int:
        """The newest generation of keys known here."""
        return self._read().generation

    @property
    def names(self) -> Names:
        return Names(self._read().namespace)

    def _read(self) -> _List:
        if not (self.path / USERS).exists():
            raise ConfigError(
                f"{str(self.path)!r} holds no users: make them with "
                f"'holdfast auth init --out {self.path}', or name the folder with --dir"
            )
        try:
            raw = read_private(self.path / USERS, "list of users")
            return msgspec.json.decode(raw, type=_List)
        except msgspec.DecodeError as error:
            raise ConfigError(f"{str(self.path / USERS)!r} cannot be read: {error}") from None

    # ---- changing

    def init(self, namespace: str) -> list[Path]:
        """Create a seed and one user per role; returns their credentials files."""
        names = Names(namespace)
        AccountSeed.create(self.path / SEED)
        with self._alone():
            self._write(_List(namespace=names.namespace, users=[]))
            self._write_config(self.path / EXAMPLE, render_server(names))
        return self._add([(_login(role), ()) for role in ROLES if role not in ISSUED_LATER])

    def add_user(self, role: str, name: str = "", buckets: Sequence[str] = ()) -> Path:
        """Issue a login for a role; returns its file."""
        if role not in ROLES:
            known = ", ".join(ROLES)
            todo = ": agents are issued by 'holdfast auth agent ID'" if role == AGENT else ""
            raise InvalidInput(f"role {role!r} is not one of {known}{todo}")
        for bucket in buckets:
            wire.check_name(bucket, "bucket")
        return self._add([(_login(role, name), tuple(buckets))])[0]

    def add_agents(
        self, agents: Sequence[str], generations: Sequence[int] = (FIRST_GENERATION,)
    ) -> list[Path]:
        """Issue agents' credentials; returns their files."""
        seed = self.seed()
        made = self._add([(seed.issue(agent, generations), ()) for agent in agents])
        self.raise_generation(max(generations))
        return made

    def add_joined(self, *hosts: JoinedLogin) -> dict[str, InvalidInput]:
        """List logins that hosts have made for themselves, with one change of the configuration.

        Hosts that are listed already are skipped. Returns what is wrong, by host.
        """
        wrong: dict[str, InvalidInput] = {}
        with self._alone():
            found = self._read()
            users = {u.nkey: u for u in found.users}
            for host in hosts:
                try:
                    users |= self._changed(users, host)
                except InvalidInput as error:
                    wrong[host.agent] = error
            self._replace(found, users)
        return wrong

    def _changed(self, users: dict[str, NatsUser], host: JoinedLogin) -> dict[str, NatsUser]:
        """The changes when a host joins: its login, and the logins of the host that it replaces."""
        known = users.get(host.nkey)
        if known and known.agent == host.agent and not known.revoked:
            return {}
        if known:
            raise InvalidInput(_TAKEN.format(host.agent))
        gone = [u for u in users.values() if u.agent == host.agent and not u.revoked]
        if gone and not host.replace:
            raise InvalidInput(
                f"agent {host.agent!r} has a login: if this host replaces it, say --replace"
            )
        added = NatsUser(
            user=agent_user(host.agent),
            role=AGENT,
            nkey=host.nkey,
            agent=host.agent,
            issued=self._now,
            ends=host.ends,
            lasts=host.lasts,
        )
        return {u.nkey: self._revoked(u) for u in gone} | {host.nkey: added}

    def _revoked(self, user: NatsUser) -> NatsUser:
        return msgspec.structs.replace(user, revoked=self._now or "yes")

    def _replace(self, found: _List, users: dict[str, NatsUser]) -> None:
        """Write the list if it has changed."""
        changed = list(users.values())
        if changed != found.users:
            self._write(msgspec.structs.replace(found, users=changed))

    def renew_joined(
        self, asks: Iterable[Renewal], now: float
    ) -> tuple[list[str], dict[str, InvalidInput]]:
        """List the next logins of agents beside their valid ones, with one change.

        Returns who got one, and what is wrong, by agent; agents that are listed already are in
        neither.
        """
        renewed: list[str] = []
        wrong: dict[str, InvalidInput] = {}
        with self._alone():
            found = self._read()
            users = {u.nkey: u for u in found.users}
            followed = {u.renews for u in found.users}
            for ask in asks:
                known = users.get(ask.nkey)
                if known and known.agent == ask.agent and not known.revoked:
                    continue
                try:
                    users[ask.nkey] = self._following(users, followed, ask, now)
                    followed.add(ask.before)
                    renewed.append(ask.agent)
                except InvalidInput as error:
                    wrong[ask.agent] = error
            self._replace(found, users)
        return renewed, wrong

    def _following(
        self, users: dict[str, NatsUser], followed: set[str], ask: Renewal, now: float
    ) -> NatsUser:
        """The next login; `followed` has those that were renewed before."""
        old = users.get(ask.before)
        if old is None or old.agent != ask.agent or old.revoked or not old.ends or old.ends < now:
            raise InvalidInput(
                f"{ask.agent} asks to renew a login that is not its own or not valid"
            )
        if ask.nkey in users:
            raise InvalidInput(_TAKEN.format(ask.agent))
        if ask.before in followed:
            raise InvalidInput(
                f"{ask.agent} has renewed its login already, and asks for another: its file may "
                "have been stolen. Revoke it with 'holdfast auth revoke', and let it join again"
            )
        if not old.ends - old.lasts - 1 <= ask.at <= now + 60:
            raise InvalidInput(f"{ask.agent} repeats an old request for a login")
        return msgspec.structs.replace(
            old, nkey=ask.nkey, issued=self._now, ends=ask.at + old.lasts, renews=ask.before
        )

    def end_joined(self, now: float) -> list[NatsUser]:
        """Revoke logins whose time is over; returns them. Those that ended long ago are dropped."""

        def over(user: NatsUser) -> bool:
            return bool(user.ends) and user.ends < now and not user.revoked

        def old(user: NatsUser) -> bool:
            return bool(user.ends) and user.ends < now - KEPT_SECONDS

        with self._alone():
            found = self._read()
            kept = (u for u in found.users if not old(u))
            self._replace(found, {u.nkey: self._revoked(u) if over(u) else u for u in kept})
        return [u for u in found.users if over(u)]

    def _revoke(self, chosen: Callable[[NatsUser], bool]) -> list[NatsUser]:
        """Revoke users; returns them."""
        with self._alone():
            found = self._read()
            gone = [u for u in found.users if chosen(u)]
            users = [self._revoked(u) if chosen(u) else u for u in found.users]
            if gone:
                self._write(msgspec.structs.replace(found, users=users))
        return gone

    def add_token(self, token: IssuedToken, now: float) -> None:
        """Record a token that was made; those that expired long ago are dropped."""
        with self._alone():
            found = self._read()
            known = [t for t in found.tokens if t.expires > now - KEPT_SECONDS]
            added = msgspec.structs.replace(token, made=self._now)
            self._write(msgspec.structs.replace(found, tokens=[*known, added]))

    def tokens(self) -> list[IssuedToken]:
        """Tokens that were made here, the newest last."""
        return self._read().tokens

    def join_login(self) -> str:
        """The seed of the login that tokens carry; made when the first token is."""
        file = self.credentials("join")
        if not any(u.user == "join" and not u.revoked for u in self.users()):
            self.add_user("join")
        return Credentials.load(file).nkey_seed

    def raise_generation(self, generation: int) -> None:
        """Record the newest generation of keys: logins issued from now on have it."""
        with self._alone():
            found = self._read()
            if generation > found.generation:
                self._write(msgspec.structs.replace(found, generation=generation))

    def revoke(self, name: str) -> list[NatsUser]:
        """Revoke logins: a user's by name, or an agent's by id."""
        wanted = {name, agent_user(name)}
        gone = self._revoke(lambda u: u.user in wanted and not u.revoked)
        if not gone:
            raise InvalidInput(f"no user or agent {name!r} is valid: see 'holdfast auth list'")
        for user in gone:
            self.credentials(user.user).unlink(missing_ok=True)
        return gone

    def renew(self, files: Sequence[Path] = ()) -> tuple[list[Path], list[str]]:
        """Rewrite the configuration and the logins' certificates for this version.

        Returns the files written, here and elsewhere, and the users whose file was neither here nor
        named.
        """
        with self._alone():
            found = self._read()
            valid = {u.nkey: u for u in found.users if not u.revoked and u.role != AGENT}
            here = [path for u in valid.values() if (path := self.credentials(u.user)).exists()]
            renewed: dict[Path, str] = {}
            for path in (*here, *files):
                login = Credentials.load(path)
                known = valid.get(login.public_nkey)
                if known is None:
                    raise InvalidInput(f"{str(path)!r} is no valid login of {str(self.path)!r}")
                same = msgspec.structs.replace(login, user=known.user, role=known.role)
                self._certified(found, same).save(path, replace=True)
                renewed[path] = known.user
            self._write(found)
        absent = {u.user for u in valid.values()} - set(renewed.values())
        return list(renewed), sorted(absent)

    def credentials(self, user: str) -> Path:
        """Where a user's private file is written."""
        return self.path / CREDENTIALS / f"{user}.json"

    def _add(self, issued: Sequence[tuple[Credentials, tuple[str, ...]]]) -> list[Path]:
        with self._alone():
            found = self._read()
            valid = {u.user for u in found.users if not u.revoked}
            for login, _ in issued:
                if login.user in valid:
                    raise InvalidInput(
                        f"user {login.user!r} has a login: revoke it first with 'holdfast auth "
                        f"revoke {login.user}', or give another name"
                    )
                valid.add(login.user)
            for login, _ in issued:
                self._certified(found, login).save(self.credentials(login.user), replace=True)
            added = [self._listed(login, buckets) for login, buckets in issued]
            self._write(msgspec.structs.replace(found, users=[*found.users, *added]))
        return [self.credentials(login.user) for login, _ in issued]

    def _certified(self, found: _List, login: Credentials) -> Credentials:
        """The login with its certificate; agents send no requests, so they need none."""
        if login.role == AGENT:
            return login
        generations = range(max(FIRST_GENERATION, found.generation - 1), found.generation + 1)
        return self.seed().certify(login, found.namespace, generations)

    def _listed(self, login: Credentials, buckets: tuple[str, ...]) -> NatsUser:
        return NatsUser(
            user=login.user,
            role=login.role,
            nkey=login.public_nkey,
            agent=login.agent if isinstance(login, AgentCredentials) else "",
            buckets=buckets,
            issued=self._now,
        )

    def _write(self, found: _List) -> None:
        valid = [user for user in found.users if not user.revoked]
        listed = msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n"
        write_private(self.path / USERS, listed, "list of users", replace=True)
        self._write_config(self.config, render_accounts(Names(found.namespace), valid))

    def _write_config(self, path: Path, text: str) -> None:
        """Readable by the server's user too: public keys and permissions are not secret."""
        write_private(path, text.encode(), "configuration", replace=True, mode=0o644)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the folder's lock: one command changes it at a time."""
        with (self.path / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _login(role: str, name: str = "") -> Credentials:
    """A fresh login."""
    user = wire.check_user(f"{role}-{wire.check_name(name, 'name')}" if name else role)
    return Credentials(user=user, role=role, nkey_seed=new_nkey_seed())
