"""What production needs, checked one by one; each finding says what to do.

`ok`, `warn`: it works, and something may surprise you; `fail`: runs can be lost, or nothing works
at all. No check changes anything; a check that cannot be made says so as a warning. The first ones
are the ground for the others: without a connection, or on a server that is too old, nothing else
is asked, and a namespace is looked at only with every permission. Nothing waits long, for a server
that forbids something says so at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from holdfast.broker import Broker
from holdfast.broker.connecting import shown_url
from holdfast.client import Client
from holdfast.config import ConnectionConfig, LivenessConfig, RecordConfig
from holdfast.errors import HoldfastError
from holdfast.status import access_checks, monitor, namespace_checks, server_checks
from holdfast.status.checkup import Check, Finding, Site

PATIENCE_SECONDS: Final = 2.0

SERVER_CHECKS: Final[dict[str, Check]] = {
    "login": access_checks.login,
    "encryption": access_checks.encryption,
    "permissions": server_checks.permissions,
    "max_payload": server_checks.payload,
    "durability": server_checks.durability,
    "storage": server_checks.storage,
}
NAMESPACE_CHECKS: Final[dict[str, Check]] = {
    "streams": namespace_checks.streams,
    "replicas": namespace_checks.replicas,
    "clock": server_checks.clock,
    "nodes": namespace_checks.node_records,
    "jobs": namespace_checks.jobs,
    "records": namespace_checks.records,
    "runs": namespace_checks.stranded_runs,
    "schedules": namespace_checks.registrations,
    "subscriptions": namespace_checks.subscriptions,
}


async def examine(
    config: ConnectionConfig,
    records: RecordConfig,
    monitor_urls: Sequence[str] = (),
    liveness: LivenessConfig | None = None,
) -> list[Finding]:
    """Every finding about the server and the namespace that a configuration points to."""
    patience = min(config.request_timeout_seconds, PATIENCE_SECONDS)
    broker = Broker(replace(config, request_timeout_seconds=patience), name="holdfast doctor")
    try:
        await broker.open(check=False)
    except HoldfastError as error:
        return [Finding("connection", "fail", str(error))]
    try:
        site = Site(broker, Client(broker, records), records, liveness)
        site.asked = monitor_urls or monitor.derived_urls(config.servers)
        return await _examine(site)
    finally:
        await broker.close()


async def _examine(site: Site) -> list[Finding]:
    url = shown_url(site.broker.config.nats_url)
    found = [Finding("connection", "ok", f"connected to {url}"), server_checks.version(site)]
    if found[-1].level == "fail":
        return found
    answers = await asyncio.gather(*(monitor.ask(url) for url in site.asked))
    site.monitors = [answer for answer in answers if answer]
    found.append(await server_checks.jetstream(site))
    found += await _check(site, SERVER_CHECKS)
    if any(one.level == "fail" for one in found if one.check in ("jetstream", "permissions")):
        text = "not looked at: that needs JetStream and every permission"
        return [*found, *(Finding(name, "warn", text) for name in NAMESPACE_CHECKS)]
    return found + await _check(site, NAMESPACE_CHECKS)


async def _check(site: Site, checks: Mapping[str, Check]) -> list[Finding]:
    found: list[Finding] = []
    for name, check in checks.items():
        try:
            found += await check(site)
        except HoldfastError as error:
            found.append(Finding(name, "warn", f"could not be checked: {error}"))
    return found
