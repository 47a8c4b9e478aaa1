"""Checks of the server: version, JetStream, permissions, durability, sizes, the clock."""

from __future__ import annotations

from typing import Final

from holdfast import errors
from holdfast.broker.connecting import REQUIRED_API_LEVEL, REQUIRED_VERSION, parse_version
from holdfast.broker.wire import ENVELOPE_BYTES
from holdfast.durations import text as duration
from holdfast.status.checkup import Finding, Level, Site, few
from holdfast.status.monitor import Jetstream
from holdfast.status.permissions import refusals

SKEW_WARN_SECONDS: Final = 0.25
SKEW_FAIL_SECONDS: Final = 1.0
FULL_WARN: Final = 0.8
FULL_FAIL: Final = 0.95
SMALLEST_PAYLOAD: Final = 4 * ENVELOPE_BYTES
USUAL_PAYLOAD: Final = 1024 * 1024
LARGEST_PAYLOAD: Final = 8 * 1024 * 1024

_WANTED = ".".join(map(str, REQUIRED_VERSION))


def version(site: Site) -> Finding:
    """Old servers silently ignore what they do not know."""
    found = site.broker.server_version or "of an unknown version"
    if parse_version(found) >= REQUIRED_VERSION:
        return Finding("server version", "ok", f"nats-server {found}")
    text = f"nats-server {found} is too old: it silently ignores message TTLs and schedules"
    return Finding("server version", "fail", text, f"upgrade it to {_WANTED} or newer")


async def jetstream(site: Site) -> Finding:
    """JetStream has to be there, on a level that knows schedules and batches."""
    try:
        site.account = await site.broker.api("INFO")
    except (errors.Unavailable, errors.NotFound) as error:
        todo = "add 'jetstream {}' to the server's configuration, and to the account if it has any"
        return Finding("jetstream", "fail", f"JetStream is not enabled ({error})", todo)
    except errors.BrokerError as error:
        return Finding("jetstream", "fail", f"could not be asked: {error}")
    level = int(site.account.get("api", {}).get("level", 0))
    if level >= REQUIRED_API_LEVEL:
        return Finding("jetstream", "ok", f"enabled, API level {level}")
    text = f"JetStream's API level is {level} and Holdfast needs {REQUIRED_API_LEVEL}"
    return Finding("jetstream", "fail", text, f"upgrade every node to {_WANTED} or newer")


async def permissions(site: Site) -> list[Finding]:
    """Every family of subjects that Holdfast uses."""
    tried, refused = await refusals(site.broker, site.records)
    if not refused:
        return [Finding("permissions", "ok", f"all {tried} subjects that were tried are allowed")]
    return [
        Finding(
            "permissions",
            "warn" if one.optional else "fail",
            f"may not {one.verb} to {few(one.subjects)}; Holdfast needs it {one.purpose}",
            f'allow this user to {one.verb} to "{one.family}"',
        )
        for one in refused
    ]


async def durability(site: Site) -> list[Finding]:
    """Whether an acknowledged write survives a power cut."""
    if site.monitors:
        return [_synced(found, site.cluster_size) for found in site.monitors]
    text = "whether every write is synced could not be checked: no monitor answers at "
    todo = "name one with --monitor-url; the server needs 'jetstream { sync_interval: always }'"
    return [Finding("durability", "warn", text + ", ".join(site.asked), todo)]


def _synced(found: Jetstream, size: int) -> Finding:
    if found.sync_always:
        return Finding("durability", "ok", f"{found.url} syncs every write (sync_always)")
    lost = f"a power cut loses up to {duration(found.sync_seconds)} of acknowledged writes"
    if size > 1:
        lost += ", when it takes a majority of the nodes"
    text = f"{found.url} does not sync every write: {lost}"
    todo = "set 'jetstream { sync_interval: always }' on every node"
    return Finding("durability", "warn", text, todo)


async def payload(site: Site) -> list[Finding]:
    """A message has to carry a body and the story of a dead letter."""
    limit = site.broker.max_message_bytes
    text = f"messages may have {limit:,} bytes"
    if limit < SMALLEST_PAYLOAD:
        text += f", of which Holdfast keeps {ENVELOPE_BYTES:,} free for a dead letter's story"
        return [Finding("max_payload", "fail", text, f"raise max_payload to {USUAL_PAYLOAD:,}")]
    if limit < USUAL_PAYLOAD:
        todo = f"raise max_payload to {USUAL_PAYLOAD:,} unless it is meant so"
        return [Finding("max_payload", "warn", f"{text}, fewer than usual", todo)]
    if limit > LARGEST_PAYLOAD:
        todo = "keep large data in an object store and send its key"
        return [Finding("max_payload", "warn", f"{text}: large ones slow everybody down", todo)]
    return [Finding("max_payload", "ok", text)]


async def storage(site: Site) -> list[Finding]:
    """A full store accepts nothing, and does not recover without a restart."""
    found = [
        _filled(f"the store behind {one.url}", one.storage_bytes, one.storage_limit)
        for one in site.monitors
        if one.storage_limit
    ]
    limit = int(site.account.get("limits", {}).get("max_storage", -1))
    if limit > 0:
        found.insert(0, _filled("the account", int(site.account.get("storage", 0)), limit))
    return found or [Finding("storage", "ok", "the account has no limit of its own")]


def _filled(what: str, used: int, limit: int) -> Finding:
    share = used / limit
    level: Level = "fail" if share >= FULL_FAIL else "warn" if share >= FULL_WARN else "ok"
    text = f"{what} has {used / 1e6:,.0f} of {limit / 1e6:,.0f} MB in use ({share:.0%})"
    todo = "raise max_storage, or drop dead letters: a full store accepts no more runs"
    return Finding("storage", level, text, "" if level == "ok" else todo)


async def clock(site: Site) -> list[Finding]:
    """Delays and schedules are due by the server's clock; ours should not tell another time."""
    if site.broker.names.jobs in site.missing:
        return [Finding("clock", "warn", "not compared with the server's: no stream tells it yet")]
    size = abs(await site.client.topology.measure_clock())
    text = f"this clock and the server's differ by {duration(size)}"
    todo = "let both keep time with NTP or chrony"
    if size > SKEW_FAIL_SECONDS:
        return [Finding("clock", "fail", f"{text}: schedulers here would not fire", todo)]
    if size > SKEW_WARN_SECONDS:
        return [Finding("clock", "warn", text, todo)]
    return [Finding("clock", "ok", text)]
