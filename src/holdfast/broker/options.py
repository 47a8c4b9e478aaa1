"""How a `ConnectionConfig` becomes the options of the NATS client: credentials and TLS."""

from __future__ import annotations

import re
import ssl
from pathlib import Path
from typing import Any

from holdfast.config import ConnectionConfig
from holdfast.errors import ConfigError


def connect_options(config: ConnectionConfig) -> dict[str, Any]:
    """Credentials and TLS; a file that cannot be read is named."""
    options: dict[str, Any] = {}
    if config.creds_file:
        options["user_credentials"] = _readable(config.creds_file, "creds_file")
    if config.nkey_seed_file:
        options["nkeys_seed"] = _readable(config.nkey_seed_file, "nkey_seed_file")
    if config.token:
        options["token"] = config.token
    if config.user:
        options["user"] = config.user
        options["password"] = config.password
    if config.tls_ca or config.tls_cert:
        options["tls"] = _tls_context(config)
        if config.tls_hostname:
            options["tls_hostname"] = config.tls_hostname
    return options


def _tls_context(config: ConnectionConfig) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=config.tls_ca or None)
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
