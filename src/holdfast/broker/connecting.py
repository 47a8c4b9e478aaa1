"""Connecting: the client's options for a `ConnectionConfig`, and which servers are accepted.

Retrying does not help against a wrong login or a certificate that is not trusted: `hopeless` says
what is wrong, and connecting ends at once. A server that is too old, or without JetStream, is
refused with `ServerTooOld` or `BrokerError`. During an election in its cluster, connecting waits;
if the election does not end, it raises `Unavailable`, since JetStream is not disabled. It also
waits while a server reloads its configuration and does not answer.

Not checked: the other nodes of the cluster, and whether streams exist.
"""

from __future__ import annotations

import logging
import re
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from holdfast import errors
from holdfast.clock import Clock
from holdfast.config import ConnectionConfig
from holdfast.errors import ConfigError

if TYPE_CHECKING:
    from holdfast.identity.credentials import Credentials
    from holdfast.identity.requests import RequestGuard, RequestSigner

log = logging.getLogger("holdfast.broker")

REQUIRED_VERSION: Final = (2, 12, 6)
"""2.12 brought schedules and atomic batches; 2.12.6 fixes CVE-2026-33222 and CVE-2026-33248."""
REQUIRED_API_LEVEL: Final = 3
"""The level that nats-server 2.12 announces; every node of a cluster must have it."""
DEFAULT_INBOX: Final = "_INBOX"

_LOGIN: Final = "check user and password, token, credentials_file, creds_file or nkey_seed_file"
_ELECTION_SECONDS: Final = 10.0
"""Longer than the election of a cluster's leader takes (4 to 8 s)."""
_RELOAD_SECONDS: Final = 2.0
"""A server that reloads its configuration is without JetStream for some milliseconds, on a busy
machine longer. If it never had JetStream, the error comes this much later."""
_PAUSE_SECONDS: Final = 0.25
"""The pause between two requests: short compared to an election, yet few requests from many
clients."""
_LEADERLESS: Final = "(10008)"
"""The server's error code for a cluster without a leader: it elects one or lacks nodes."""

Account = Callable[[], Awaitable[dict[str, Any]]]
"""Requests JetStream's account information."""


def check_version(version: str) -> None:
    """Refuse a server that is too old."""
    if parse_version(version) < REQUIRED_VERSION:
        wanted = ".".join(map(str, REQUIRED_VERSION))
        raise errors.ServerTooOld(
            f"nats-server {version or '(unknown)'} is too old: Holdfast needs "
            f"{wanted} or newer, because older ones silently ignore message TTLs and "
            "schedules. Upgrade the server, or run 'holdfast server'"
        )


async def check_jetstream(account: Account, clock: Clock) -> int:
    """The JetStream API level; raises `ServerTooOld` if it is too low."""
    info = await _answered(account, clock)
    level = int(info.get("api", {}).get("level", 0))
    if level < REQUIRED_API_LEVEL:
        raise errors.ServerTooOld(
            f"the server's JetStream API level is {level} and Holdfast needs "
            f"{REQUIRED_API_LEVEL} or more (nats-server 2.12): upgrade every node"
        )
    return level


async def _answered(account: Account, clock: Clock) -> dict[str, Any]:
    """JetStream's answer about the account; an election and a reload are waited for.

    A request that was sent during an election is never answered, so it is repeated soon.
    """
    began = clock.monotonic()
    while True:
        try:
            return await account()
        except (errors.Unavailable, errors.NotFound, errors.OutcomeUnknown) as error:
            electing = isinstance(error, errors.OutcomeUnknown) or _LEADERLESS in str(error)
            waited = clock.monotonic() - began
            if electing and waited > _ELECTION_SECONDS:
                raise errors.Unavailable(
                    f"the cluster has no leader ({error}): start the servers that are missing, "
                    "most of them must run"
                ) from None
            if not electing and waited > _RELOAD_SECONDS:
                raise errors.BrokerError(
                    f"JetStream is not enabled on this server or account ({error}): "
                    "add 'jetstream {}' to the server's configuration"
                ) from None
        await clock.sleep(_PAUSE_SECONDS)


def parse_version(text: str) -> tuple[int, int, int]:
    """Parse `2.12.6-RC.1` into numbers; unreadable parts count as 0."""
    parts = [*text.split("-")[0].split("."), "0", "0", "0"]
    major, minor, patch = (int(p) if p.isdigit() else 0 for p in parts[:3])
    return major, minor, patch


# ---- options


def connect_options(config: ConnectionConfig) -> dict[str, Any]:
    """Credentials and TLS; an error names the file that cannot be read."""
    options: dict[str, Any] = {"inbox_prefix": inbox_prefix(config)}
    if login := _login(config):
        options["nkeys_seed_str"] = login.nkey_seed
    if config.creds_file:
        options["user_credentials"] = _readable(config.creds_file, "creds_file")
    if config.nkey_seed_file:
        options["nkeys_seed"] = _readable(config.nkey_seed_file, "nkey_seed_file")
    if config.token:
        options["token"] = config.token
    if config.user:
        options["user"] = config.user
        options["password"] = config.password
    return options | _tls_options(config)


def request_signer(config: ConnectionConfig, now: Callable[[], float]) -> RequestSigner | None:
    """The signer of this login's requests; None without a login that can prove its role."""
    from holdfast.identity.requests import RequestSigner

    login = _login(config)
    return RequestSigner(login, config.namespace, now) if login and login.certificates else None


def request_guard(config: ConnectionConfig) -> RequestGuard:
    """The verifier of others' requests, by the account's public keys in the credentials file."""
    from holdfast.identity.credentials import AGENT
    from holdfast.identity.requests import RequestGuard

    login = _login(config)
    if login and not login.anchors and login.role != AGENT:
        log.warning(
            "the credentials file of %s is of an earlier version: requests are obeyed without "
            "proof of who sent them. Run 'holdfast auth renew', and use the file again",
            login.user,
        )
    anchors = login.anchors if login else {}
    return RequestGuard(config.namespace, anchors, accept_unsigned=config.accept_unsigned)


def inbox_prefix(config: ConnectionConfig) -> str:
    """The prefix of the subjects on which answers arrive."""
    if config.inbox_prefix:
        return config.inbox_prefix
    login = _login(config)
    return login.inbox if login else DEFAULT_INBOX


def _login(config: ConnectionConfig) -> Credentials | None:
    """The login of `holdfast auth`, if one is configured."""
    if not config.credentials_file:
        return None
    from holdfast.identity.credentials import Credentials

    return Credentials.load(config.credentials_file)


def _tls_options(config: ConnectionConfig) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if config.encrypted:
        options["tls"] = _tls_context(config)
    if config.tls_hostname:
        options["tls_hostname"] = config.tls_hostname
    if config.tls_handshake == "first":
        options["tls_handshake_first"] = True
    return options


def _tls_context(config: ConnectionConfig) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=config.tls_ca or None)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if config.tls_cert:
            context.load_cert_chain(config.tls_cert, config.tls_key or None)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"the TLS files cannot be used: {error}") from None
    return context


def _readable(path: str, what: str) -> str:
    try:
        with Path(path).open("rb"):
            return path
    except OSError as error:
        raise ConfigError(f"{what} {path!r} cannot be read: {error.strerror}") from None


def shown_url(url: str) -> str:
    """A server address without the secrets it may contain."""
    return re.sub(r"//[^@/,]*@", "//***@", url)


def hopeless(error: BaseException | None) -> str:
    """What is wrong and what to do, if retrying cannot help; else empty."""
    text = str(error).removeprefix("nats: ").strip("'")
    if "authorization" in text.lower() or "authentication" in text.lower():
        return f"refuses the login ({text}): {_LOGIN}"
    if isinstance(error, ssl.SSLCertVerificationError):
        return (
            f"shows a certificate that is not trusted ({error.verify_message}): set tls_ca to the "
            "authority that signed it, and tls_hostname if it names another host"
        )
    if isinstance(error, ssl.SSLError) and "CERTIFICATE_REQUIRED" in text.upper():
        return "wants a certificate of the client: set tls_cert and tls_key"
    return ""
