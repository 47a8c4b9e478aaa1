"""Checks the network part of a configuration: exposed listeners, missing or weak TLS."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal

from holdfast.identity.conf import find

Parts = tuple[Literal["fail", "warn"], str, str, str]

_LOOPBACK: Final = ("127.", "localhost", "::1", "[::1]")


def network_flaws(values: Mapping[str, Any]) -> Iterator[Parts]:
    """Listeners reachable without TLS, and TLS that does not protect."""
    tls = find(values, "tls")
    if not _local(values, "listen", "host", "net", "addr") and not tls:
        yield (
            "fail",
            "listen",
            "clients reach it from other machines, and there is no TLS: logins and payloads are "
            "sent in clear text",
            "add tls { cert_file, key_file }, or listen on 127.0.0.1",
        )
    yield from _tls_flaws(values, tls)
    yield from _monitor_flaws(values)
    yield from _cluster_flaws(values)


def _tls_flaws(values: Mapping[str, Any], tls: Any) -> Iterator[Parts]:
    if find(values, "allow_non_tls"):
        yield (
            "fail",
            "allow_non_tls",
            "clients may connect without TLS",
            "remove it once every client uses tls://",
        )
    for place in ("cluster", "leafnodes", "gateway"):
        inner = find(find(values, place) or {}, "tls")
        if isinstance(inner, Mapping) and find(inner, "insecure"):
            yield (
                "fail",
                f"{place}.tls",
                "accepts any certificate (insecure)",
                "remove it and name the authority with ca_file",
            )
    if isinstance(tls, Mapping) and find(tls, "verify") and not find(tls, "ca_file"):
        yield (
            "warn",
            "tls",
            "verifies clients against the authorities of the system (no ca_file)",
            "name your own authority with ca_file",
        )


def _monitor_flaws(values: Mapping[str, Any]) -> Iterator[Parts]:
    for key in ("http", "http_port", "monitor_port"):
        if (address := find(values, key)) is not None and not _is_local(str(address)):
            yield (
                "warn",
                key,
                "the monitor has no login, and other machines can reach it",
                "listen on 127.0.0.1, or keep others away with a firewall or a NetworkPolicy",
            )


def _cluster_flaws(values: Mapping[str, Any]) -> Iterator[Parts]:
    cluster = find(values, "cluster")
    if not isinstance(cluster, Mapping) or _local(cluster, "listen", "host", "net", "addr"):
        return
    if not find(cluster, "tls"):
        yield (
            "fail",
            "cluster",
            "nodes on other machines join without TLS: whoever joins sees everything",
            "add tls { cert_file, key_file, ca_file } to the cluster",
        )
    elif not find(cluster, "authorization") and not find(find(cluster, "tls"), "verify"):
        yield (
            "warn",
            "cluster",
            "any node with access to the port may join",
            "add verify: true to its tls",
        )


def _local(values: Mapping[str, Any], *keys: str) -> bool:
    """Whether it listens on loopback; without an address it listens everywhere."""
    given = [str(v) for v in (find(values, key) for key in keys) if v is not None]
    return bool(given) and all(map(_is_local, given))


def _is_local(address: str) -> bool:
    return address.strip().lower().startswith(_LOOPBACK)
