"""What production needs, checked one by one; each finding says what to do.

`ok`; `warn`: it works but may surprise you; `fail`: runs can be lost, or nothing works. Checks
change nothing; one that cannot be made reports a warning. The first checks are preconditions:
without a connection, or on a server that is too old, no others run, and the namespace is examined
only with every permission. Nothing waits long, because a server reports a forbidden subject at
once.
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
from holdfast.status import checks, probes
from holdfast.status.probes import Check, Finding, Site

PATIENCE_SECONDS: Final = 2.0
"""Timeout of each answer: a healthy server answers in milliseconds, and there are many requests."""

SERVER_CHECKS: Final[dict[str, Check]] = {
    "login": checks.login,
    "encryption": checks.encryption,
    "permissions": checks.permissions,
    "max_payload": checks.payload,
    "durability": checks.durability,
    "storage": checks.storage,
}
NAMESPACE_CHECKS: Final[dict[str, Check]] = {
    "streams": checks.streams,
    "replicas": checks.replicas,
    "clock": checks.clock,
    "nodes": checks.node_records,
    "jobs": checks.jobs,
    "records": checks.records,
    "runs": checks.stranded_runs,
    "limits": checks.limits,
    "flows": checks.flows,
    "schedules": checks.registrations,
    "subscriptions": checks.subscriptions,
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
        site.asked = monitor_urls or probes.derived_urls(config.servers)
        return await _examine(site)
    finally:
        await broker.close()


async def _examine(site: Site) -> list[Finding]:
    url = shown_url(site.broker.config.nats_url)
    found = [Finding("connection", "ok", f"connected to {url}"), checks.version(site)]
    if found[-1].level == "fail":
        return found
    answers = await asyncio.gather(*(probes.ask(url) for url in site.asked))
    site.monitors = [answer for answer in answers if answer]
    found.append(await checks.jetstream(site))
    found += await _check(site, SERVER_CHECKS)
    if any(one.level == "fail" for one in found if one.check in ("jetstream", "permissions")):
        text = "not checked: that needs JetStream and every permission"
        return [*found, *(Finding(name, "warn", text) for name in NAMESPACE_CHECKS)]
    return found + await _check(site, NAMESPACE_CHECKS)


async def _check(site: Site, chosen: Mapping[str, Check]) -> list[Finding]:
    found: list[Finding] = []
    for name, check in chosen.items():
        try:
            found += await check(site)
        except HoldfastError as error:
            found.append(Finding(name, "warn", f"could not be checked: {error}"))
    return found
