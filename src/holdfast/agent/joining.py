"""A host joins: it makes its keys, asks with its token, and waits for its credentials.

The keys are made before the first request and kept in the agent's folder (0600), so a host that is
restarted continues as the same host. They never leave it: the agent's keys arrive sealed to one of
them. Once the servers have admitted the new login, the files of the request are removed. The
servers' addresses and certificates stay in the folder, so later starts need no token.

A host waits for an operator as long as it takes; a refusal that waiting cannot cure ends it with an
error that says what to do. Its clock may be wrong: it signs its requests with the centre's time.
"""

from __future__ import annotations

import dataclasses
import logging
import random
import socket
import time
from pathlib import Path
from typing import Final

import msgspec
from nacl.public import PrivateKey

from holdfast.broker import Broker
from holdfast.clock import SystemClock
from holdfast.config import ConnectionConfig
from holdfast.errors import BrokerError, ConfigError, InvalidInput, Unreadable
from holdfast.identity.credentials import AgentCredentials, Credentials, new_nkey_seed
from holdfast.identity.files import read_private, write_private
from holdfast.identity.joining import Joiner, JoinToken
from holdfast.model.codec import Codec
from holdfast.model.join import REPLY, JoinReply, fingerprint
from holdfast.version import __version__

log = logging.getLogger("holdfast.agent")

FILE: Final = "credentials.json"
"""The agent's own credentials, in its folder."""
ASK_SECONDS: Final = 2.0
"""The shortest pause between requests; short, because a person is waiting for the host."""
LONGEST_ASK_SECONDS: Final = 60.0
"""The longest pause; each is a tenth of the time waited so far. So ten thousand hosts that nobody
accepts ask 170 times a second in all."""
ANSWER_SECONDS: Final = 5.0
"""How long to wait for an answer. A dispatcher answers at once; a lost request is sent again."""
_KEYS: Final = "joining.json"
_LOGIN: Final = "joining-login.json"
_URL: Final = "servers.url"
_CA: Final = "servers.pem"
_WHAT: Final = "keys of this host"


class _Keys(msgspec.Struct, frozen=True):
    login: str
    box: bytes

    def __repr__(self) -> str:
        return "_Keys(***)"


def reaching(connection: ConnectionConfig, folder: Path) -> ConnectionConfig:
    """The connection: the options, completed by what the token says."""
    url, ca = folder / _URL, folder / _CA
    if url.exists() and connection.nats_url == ConnectionConfig().nats_url:
        text = url.read_text(encoding="utf-8")
        connection = dataclasses.replace(connection, nats_url=text)
    if ca.exists() and not connection.tls_ca:
        connection = dataclasses.replace(connection, tls_ca=str(ca))
    return connection


def _keep_servers(token: JoinToken, folder: Path) -> None:
    for name, text in ((_URL, token.url), (_CA, token.ca)):
        if text:
            write_private(folder / name, text.encode(), "what the token says", replace=True)
        else:
            (folder / name).unlink(missing_ok=True)


async def join(text: str, agent: str, folder: Path, connection: ConnectionConfig) -> Path:
    """Join with a token; returns the file with the agent's credentials."""
    file = folder / FILE
    if file.exists() and not _over(file):
        log.info("agent %s has joined before: the token is not used", agent)
        connection = reaching(connection, folder)
    else:
        await _ask(JoinToken.read(text), agent, folder, connection)
        connection = reaching(connection, folder)
    if (folder / _KEYS).exists():
        await _admitted(dataclasses.replace(connection, credentials_file=str(file)))
        (folder / _KEYS).unlink()
        log.info("agent %s has joined", agent)
    return file


async def _ask(token: JoinToken, agent: str, folder: Path, connection: ConnectionConfig) -> None:
    """Ask until there are credentials, and keep them."""
    file = folder / FILE
    if not token.allows.allows(agent):
        raise InvalidInput(f"the token is for {token.allows.pattern!r}, not for {agent!r}")
    if token.allows.namespace != connection.namespace:
        raise InvalidInput(
            f"the token is for namespace {token.allows.namespace!r}: set --namespace"
        )
    _keep_servers(token, folder)
    connection = reaching(connection, folder)
    keys = _own_keys(folder / _KEYS, file)
    joiner = Joiner(token, agent, connection.namespace, keys.login, keys.box)
    login = folder / _LOGIN
    Credentials(user="join", role="join", nkey_seed=token.login).save(login, replace=True)
    broker = Broker(dataclasses.replace(connection, credentials_file=str(login)), name="joining")
    try:
        await broker.open(check=False)
        answer = await _answered(broker, joiner)
    finally:
        await broker.close()
        login.unlink(missing_ok=True)
    joiner.credentials(answer).save(file, replace=True)


def _over(file: Path) -> bool:
    """Whether the login has ended: then this host must ask again, as a known one."""
    ends = AgentCredentials.load(file).ends
    return bool(ends) and ends < time.time()


async def _admitted(connection: ConnectionConfig) -> None:
    """Wait until the servers have reloaded their configuration and know the login."""
    clock = SystemClock()
    error = await not_admitted(connection)
    if error:
        log.info("waiting for the servers to take the new login: %s", error)
    while error:
        await clock.sleep(ASK_SECONDS)
        error = await not_admitted(connection)


async def not_admitted(connection: ConnectionConfig) -> str:
    """Why the servers do not admit a login yet; empty if they do."""
    broker = Broker(connection, name="trying a login")
    try:
        await broker.open(check=False)
    except BrokerError as error:
        return str(error)
    finally:
        await broker.close()
    return ""


def _own_keys(path: Path, ended: Path) -> _Keys:
    """The keys to ask with; not those of a login that has ended, which were answered already."""
    codec = Codec[_Keys](_Keys, f"the {_WHAT}", strict=False)
    if path.exists():
        try:
            known = codec.decode(read_private(path, _WHAT))
        except Unreadable as error:
            raise ConfigError(f"{error}: remove {path} and ask again") from None
        if not ended.exists() or AgentCredentials.load(ended).nkey_seed != known.login:
            return known
    made = _Keys(new_nkey_seed(), bytes(PrivateKey.generate()))
    write_private(path, codec.encode(made), _WHAT, replace=True)
    return made


async def _answered(broker: Broker, joiner: Joiner) -> bytes:
    told, begun, ahead = "", broker.clock.monotonic(), 0.0
    while True:
        reply = await _asked(broker, joiner, ahead)
        if reply.now:
            ahead = reply.now - broker.server_now()
        if reply.answer:
            return reply.answer
        if reply.state == "rejected":
            raise InvalidInput(f"an operator has rejected {joiner.agent}")
        if reply.error and not reply.again:
            raise InvalidInput(f"{joiner.agent} cannot join: {reply.error}")
        now = reply.error or (
            f"{joiner.agent} is {reply.state}: 'holdfast agents accept' lets it in. This host has "
            f"the fingerprint {fingerprint(joiner.nkey)}"
        )
        if now != told:
            log.info("waiting to join: %s", now)
            told = now
        waited = broker.clock.monotonic() - begun
        pause = min(max(waited / 10, ASK_SECONDS), LONGEST_ASK_SECONDS)
        await broker.clock.sleep(pause * random.uniform(0.75, 1.0))


async def _asked(broker: Broker, joiner: Joiner, ahead: float) -> JoinReply:
    """One answer, and how many seconds the centre's clock is ahead of ours."""
    body = joiner.ask(broker.server_now() + ahead, socket.gethostname(), __version__)
    try:
        answer = await broker.request(broker.names.join, body, timeout=ANSWER_SECONDS)
        return REPLY.decode(answer.body)
    except (BrokerError, Unreadable) as error:
        return JoinReply(
            error=f"no dispatcher that has the account seed answers ({error})", again=True
        )
