"""How a `ConnectionConfig` becomes the options of the NATS client: credentials and TLS.

Also what a server's refusal means: a wrong login and a certificate that does not fit do not get
better by trying again, so they end the attempt to connect at once, with a sentence (`hopeless`).
"""

from __future__ import annotations

import logging
import re
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from holdfast.config import ConnectionConfig
from holdfast.errors import ConfigError
from holdfast.identity import RequestGuard, RequestSigner, load_credentials
from holdfast.identity.credentials import AGENT

log = logging.getLogger("holdfast.broker")

DEFAULT_INBOX: Final = "_INBOX"

_LOGIN: Final = "check user and password, token, credentials_file, creds_file or nkey_seed_file"


def connect_options(config: ConnectionConfig) -> dict[str, Any]:
    """Credentials and TLS; a file that cannot be read is named."""
    options: dict[str, Any] = {"inbox_prefix": inbox_prefix(config)}
    if config.credentials_file:
        options["nkeys_seed_str"] = load_credentials(config.credentials_file).nkey_seed
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
    """What signs this login's requests; None without a login that can prove its role."""
    login = load_credentials(config.credentials_file) if config.credentials_file else None
    return RequestSigner(login, config.namespace, now) if login and login.certificates else None


def request_guard(config: ConnectionConfig) -> RequestGuard:
    """What verifies others' requests: by the account's public keys in the credentials file."""
    login = load_credentials(config.credentials_file) if config.credentials_file else None
    if login and not login.anchors and login.role != AGENT:
        log.warning(
            "the credentials file of %s is of an earlier version: requests are obeyed without "
            "proof of who sent them. Run 'holdfast auth renew', and use the file again",
            login.user,
        )
    anchors = login.anchors if login else {}
    return RequestGuard(config.namespace, anchors, accept_unsigned=config.accept_unsigned)


def inbox_prefix(config: ConnectionConfig) -> str:
    """The subject below which answers arrive."""
    if config.inbox_prefix:
        return config.inbox_prefix
    if config.credentials_file:
        return load_credentials(config.credentials_file).inbox
    return DEFAULT_INBOX


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
    """A server address without the secrets that it may carry."""
    return re.sub(r"//[^@/,]*@", "//***@", url)


def hopeless(error: BaseException | None) -> str:
    """What is wrong and what to do, for an error that no further try can change; else empty."""
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
