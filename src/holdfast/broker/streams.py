"""The streams, buckets and consumers of a namespace: their configuration and creation.

Missing ones are created; existing ones are never changed without the operator: `drift` reports
differences and `holdfast doctor` shows them. One exception: in the buckets that agents write, the
headers by which one agent could touch another's keys are always disabled. Creating is idempotent,
so any number of processes may start at once.

Sequences only grow, even across a deletion. A revision is an epoch, a term or the position up to
which somebody has read, and a stream sequence is part of the subject that acknowledges a message.
If a recreated stream began at 1 again, old numbers would be higher than new ones, and an old
acknowledgement would remove another message. So these streams begin at the microsecond, by the
server's clock, at which they are created: nothing writes a million times a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, NamedTuple

from holdfast import errors
from holdfast.broker.connection import Broker
from holdfast.broker.kv import Bucket, parse_time
from holdfast.clock import rfc3339
from holdfast.config import RecordConfig
from holdfast.durations import DAY, NANO
from holdfast.names import Names, kv_stream, kv_subject, parse_consumer, pause_key
from holdfast.retrying import starting

log = logging.getLogger("holdfast.broker")

MEGABYTE: Final = 1_000_000
INDEX_PART: Final = 5
"""The index of the history may take a fifth of its size; it needs a twentieth for small runs."""
MAX_CONSUMERS: Final = 100_000
"""One consumer per job and group; nobody has this many. Without a number here the server applies
the account's limit, and a low one would stop new jobs."""
MAX_ACK_PENDING: Final = 50_000
"""Messages of one job that all its workers together may hold unacknowledged: 500 workers with 100
each. The server's default of 1,000 would idle a large group."""
MAX_WAITING: Final = 8_192
"""Pull requests of all workers that wait on one consumer, two per worker. The server's default of
512 would refuse the 257th worker."""
FOREVER: Final = "2199-01-01T00:00:00Z"
"""The end of a pause: the server only knows pauses that end."""
LOOK_SECONDS: Final = 0.5
"""A request sent during an election is never answered: repeat it soon."""
BUCKETS: Final = ("runs", "schedules", "slots", "leases", "nodes")
MARKED: Final = ("leases",)
"""Buckets in which an expiry leaves a marker, to notify those who wait for it. Only leases: in the
others every record expires some day, and each would cost one more write."""
MARKER_SECONDS: Final = 60
"""How long such a marker stays: longer than a watcher needs to reconnect."""
RUN_LOG_MESSAGES: Final = 1_000
"""Messages with log lines kept of each run, the newest. One holds what a run logs in a quarter of a
second, up to 16 kB."""
RUN_LOGS_MESSAGES: Final = 200_000
"""Messages with log lines of all runs: each run is a subject, which takes about 200 bytes of the
server's memory."""
FLEET_BUCKETS: Final = ("fleet", "returns", "facts", "agents", "joins")
"""Created by the first dispatcher."""
RETURNS_DAYS: Final = 7
"""How long an agent's return can be shown; the record of its run is kept longer."""
SETTINGS_BUCKETS: Final = ("settings", "secrets", "applied")
"""Created by the first who publishes settings."""
LIMITS_BUCKETS: Final = ("limits",)
"""Created by the first worker that has a job with a limit."""
AGENTS_WRITE: Final = ("returns", "facts", "agents", "applied")
"""Buckets in which an agent may write its own keys only. `Nats-Rollup: all` on one of them would
delete everybody's, and open batches would keep others from writing."""
QUIET: Final = ("secrets",)
"""Buckets whose writes are republished without their content."""

APP_LABEL: Final = "holdfast-app"
"""The label of a consumer that names the app whose job it serves."""
MICROSECONDS: Final = 1_000_000
"""First sequences are microseconds: below 2**53 until the year 2255, so every JSON reader is exact,
and faster than any server stores."""

Config = dict[str, Any]


def stream_configs(names: Names, records: RecordConfig, replicas: int) -> list[Config]:
    """All streams of a namespace, including its core buckets."""
    window = int(records.dedup_window_seconds * NANO)
    ns = names.namespace
    base: Config = {"storage": "file", "num_replicas": replicas, "allow_direct": True}
    plain = [
        base
        | {
            "name": names.dead,
            "subjects": [f"{ns}.dead.>"],
            "retention": "limits",
            "max_age": int(records.dead_days * DAY * NANO),
            "duplicate_window": window,
        },
        base
        | {
            "name": names.ledger,
            "subjects": [f"{ns}.log.>"],
            "retention": "limits",
            "max_age": int(records.ledger_days * DAY * NANO),
            "duplicate_window": window,
        },
        base
        | {
            "name": names.run_logs,
            "subjects": [names.run_log(">")],
            "retention": "limits",
            "discard": "old",
            "max_age": int(records.run_log_days * DAY * NANO),
            "max_bytes": records.run_log_megabytes * 1_000_000,
            "max_msgs": RUN_LOGS_MESSAGES,
            "max_msgs_per_subject": RUN_LOG_MESSAGES,
        },
        base
        | {
            "name": names.jobs,
            "subjects": [f"{ns}.job.>", f"{ns}.later.>", f"{ns}.canary.>"],
            "retention": "workqueue",
            "duplicate_window": window,
            "allow_msg_schedules": True,
            "allow_msg_ttl": True,
            "allow_atomic": True,
            "max_consumers": MAX_CONSUMERS,
        },
        base
        | {
            "name": names.events,
            "subjects": [f"{ns}.event.>"],
            "retention": "limits",
            "max_age": int(records.event_days * DAY * NANO),
            "duplicate_window": window,
            "max_consumers": MAX_CONSUMERS,
        },
        base
        | {
            "name": names.history,
            "subjects": [f"{ns}.ended.>"],
            "retention": "limits",
            "max_age": int(records.history_days * DAY * NANO),
            "max_bytes": records.history_megabytes * MEGABYTE,
        },
        base
        | {
            "name": names.history_index,
            "subjects": [f"{ns}.indexed.>"],
            "retention": "limits",
            "max_age": int(records.history_days * DAY * NANO),
            "max_bytes": max(records.history_megabytes // INDEX_PART, 1) * MEGABYTE,
            "allow_rollup_hdrs": True,
            "allow_msg_ttl": True,
        },
        base
        | {
            "name": names.flows,
            "subjects": [f"{ns}.flow.>", f"{ns}.signal.>", f"{ns}.wait.>"],
            "retention": "limits",
            "duplicate_window": window,
            "allow_msg_ttl": True,
        },
    ]
    return plain + [bucket_config(names, noun, replicas) for noun in BUCKETS]


def bucket_config(names: Names, noun: str, replicas: int) -> Config:
    """A bucket: last value per key, per-key TTL, and each write republished on a plain subject."""
    bucket = names.bucket(noun)
    marked = {"subject_delete_marker_ttl": MARKER_SECONDS * NANO} if noun in MARKED else {}
    return (
        marked
        | _plain_bucket(names, noun, bucket, replicas)
        | (_returns_config(names) if noun == "returns" else {})
    )


def _returns_config(names: Names) -> Config:
    """Returns: published on a subject that names the agent, stored as a key, the first one wins.

    So an agent needs no permission to write any bucket, and a return is stored on arrival, even
    without a dispatcher.
    """
    bucket = names.returns
    return {
        "subjects": [kv_subject(bucket, ">"), names.returned("*", "*")],
        "subject_transform": {
            "src": names.returned("*", "*"),
            "dest": kv_subject(bucket, "{{wildcard(1)}}.{{wildcard(2)}}"),
        },
        "discard_new_per_subject": True,
        "max_age": RETURNS_DAYS * DAY * NANO,
    }


def _plain_bucket(names: Names, noun: str, bucket: str, replicas: int) -> Config:
    return {
        "name": kv_stream(bucket),
        "subjects": [kv_subject(bucket, ">")],
        "storage": "file",
        "retention": "limits",
        "discard": "new",
        "num_replicas": replicas,
        "max_msgs_per_subject": 1,
        "allow_direct": True,
        # The server requires it where expiries leave markers; a program may purge its own keys.
        "allow_rollup_hdrs": noun in MARKED or noun.startswith("data_"),
        "allow_msg_ttl": True,
        "allow_atomic": noun not in AGENTS_WRITE,
        "deny_delete": True,
        "max_consumers": MAX_CONSUMERS,
        "republish": {"src": kv_subject(bucket, ">"), "dest": names.changed(bucket, ">")}
        | ({"headers_only": True} if noun in QUIET else {}),
    }


def consumer_config(name: str, subject: str, ack_wait: float, in_order: bool = False) -> Config:
    """A job's durable consumer. The server does not limit deliveries: the record counts them.

    `in_order`: it delivers a message only after the one before it was acknowledged.
    """
    return {
        "durable_name": name,
        "ack_policy": "explicit",
        "ack_wait": int(ack_wait * NANO),
        "max_deliver": -1,
        "max_ack_pending": 1 if in_order else MAX_ACK_PENDING,
        "max_waiting": MAX_WAITING,
        "filter_subject": subject,
        "deliver_policy": "all",
        "replay_policy": "instant",
    }


class Difference(NamedTuple):
    """One option of a stream's configuration that differs from what Holdfast wants."""

    stream: str
    key: str
    """Empty if the stream does not exist."""
    actual: Any
    wanted: Any

    def __str__(self) -> str:
        if not self.key:
            return f"{self.stream} does not exist: a worker or 'holdfast control' makes it"
        return f"{self.stream}: {self.key} is {self.actual!r}, not {self.wanted!r}"


class Topology:
    """Creates and inspects what a namespace needs on the server."""

    def __init__(self, broker: Broker, records: RecordConfig) -> None:
        self.broker = broker
        self.records = records
        self._broker = broker
        self._names = broker.names

    async def wanted_replicas(self) -> int:
        """As configured, else as many as the cluster has nodes, up to three."""
        if self._broker.config.replicas:
            return self._broker.config.replicas
        return min(3, max(1, await self.cluster_size()))

    async def cluster_size(self) -> int:
        """The number of nodes in the cluster; 1 without clustering."""
        if not self._broker.cluster_name:
            return 1
        known = self._broker.known_servers
        return max(1, known)

    async def ensure(self) -> None:
        """Create every missing stream and bucket; measure the server's clock.

        It begins with those whose sequences are never compared: the server's time is read from one
        of them, and the sequences of the other streams begin at that time.
        """
        configs = stream_configs(self._names, self.records, await self.wanted_replicas())
        plain = (self._names.dead, self._names.ledger)
        await self._ensure_all([c for c in configs if c["name"] in plain])
        await self._ensure_all([c for c in configs if c["name"] not in plain])
        await self._start(self.measure_clock, "reading the server's clock")

    async def ensure_buckets(self, *nouns: str) -> None:
        """Create missing buckets."""
        replicas = await self.wanted_replicas()
        await self._ensure_all([bucket_config(self._names, noun, replicas) for noun in nouns])

    async def _ensure_all(self, configs: list[Config]) -> None:
        """Create streams concurrently: in a cluster each waits for the election of its leader."""
        steps = (
            self._start(functools.partial(self.ensure_stream, c), f"preparing {c['name']}")
            for c in configs
        )
        outcomes = await asyncio.gather(*steps, return_exceptions=True)
        old = (self._names.history, self._names.history_index)
        for config, outcome in zip(configs, outcomes, strict=True):
            if config["name"] == self._names.run_logs and isinstance(outcome, errors.BrokerError):
                log.warning("log lines of runs are not kept: %s", outcome)
            elif config["name"] == self._names.flows and isinstance(
                outcome, errors.PermissionDenied
            ):
                log.warning("flows cannot run (an earlier version's login): %s", outcome)
            elif config["name"] in old and isinstance(outcome, errors.PermissionDenied):
                log.warning("ended runs are not kept (an earlier version's login): %s", outcome)
            elif outcome is not None:
                raise outcome

    async def _start(self, step: Callable[[], Awaitable[object]], what: str) -> None:
        """Retry: a cluster that has just started needs a moment, and every step is idempotent."""
        await starting(step, clock=self._broker.clock, what=what)

    async def ensure_stream(self, config: Config) -> None:
        """Create one stream unless it exists."""
        try:
            info = await self._broker.api(f"STREAM.INFO.{config['name']}", timeout=LOOK_SECONDS)
            await self._harden(config, info["config"])
            return
        except errors.NotFound:
            pass
        try:
            first = await self._first_sequence(config["name"])
            await self._create(config | first)
        except (errors.TryAgain, errors.NotFound):  # "not found", while the cluster elects a leader
            raise
        except errors.PermissionDenied:
            raise errors.PermissionDenied(
                f"{config['name']} does not exist yet, and this login may not make it: start a "
                "worker or 'holdfast control' first"
            ) from None
        except errors.BrokerError as error:
            if "already in use" not in str(error):
                kind = errors.Unavailable if "peer offline" in str(error) else errors.BrokerError
                raise kind(f"cannot create {config['name']}: {error}") from None

    async def _create(self, config: Config) -> None:
        """Create a stream; one that reserves more storage than the server has gets less."""
        while True:
            try:
                await self._broker.api(f"STREAM.CREATE.{config['name']}", config)
                return
            except errors.BrokerError as error:
                smaller = config.get("max_bytes", 0) // 2
                if "insufficient storage" not in str(error) or smaller < MEGABYTE:
                    raise
            config = config | {"max_bytes": smaller}
            log.warning(
                "the server cannot reserve the configured storage for %s: it gets %d MB",
                config["name"],
                smaller // MEGABYTE,
            )

    async def _harden(self, wanted: Config, actual: Config) -> None:
        """Disable what lets one agent touch another's keys; stored records stay."""
        if wanted["name"] not in {kv_stream(self._names.bucket(noun)) for noun in AGENTS_WRITE}:
            return
        harmful = ("allow_rollup_hdrs", "allow_atomic")
        changes = {key: False for key in harmful if actual.get(key) and not wanted[key]}
        if not changes:
            return
        try:
            await self.update_stream(wanted["name"], changes)
            log.info("%s: switched off %s", wanted["name"], " and ".join(changes))
        except errors.PermissionDenied:
            log.warning(
                "%s lets one agent delete the records of all (%s): this login may not change it. "
                "Run 'holdfast doctor --fix' as operator",
                wanted["name"],
                " and ".join(changes),
            )

    async def _first_sequence(self, stream: str) -> Config:
        """The first sequence of a new stream: above all that a deleted one can have had."""
        if stream in (self._names.dead, self._names.ledger) or stream == self._names.taskiq_dead:
            return {}  # nothing compares these, and people type in the numbers of dead letters
        if not self._broker.time.known:
            for known in (self._names.jobs, self._names.ledger):
                with contextlib.suppress(errors.NotFound):
                    await self._measure(known)
                    break
        return {"first_seq": int(self._broker.server_now() * MICROSECONDS)}

    async def measure_clock(self) -> float:
        """Measure the server's time; returns how far it is ahead of this machine's."""
        return await self._measure(self._names.jobs)

    async def _measure(self, stream: str) -> float:
        info = await self._broker.api(f"STREAM.INFO.{stream}", timeout=LOOK_SECONDS)
        time = self._broker.time
        if "ts" in info:
            time.learn(parse_time(info["ts"]), self._broker.clock.monotonic(), self.measure_clock)
        return -time.offset

    async def drift(self) -> list[str]:
        """How the streams on the server differ from what Holdfast would create, in words."""
        return [str(difference) for difference in await self.differences()]

    async def differences(self) -> list[Difference]:
        """How the streams on the server differ from what Holdfast would create."""
        found = []
        replicas = await self.wanted_replicas()
        nouns = LIMITS_BUCKETS + FLEET_BUCKETS + SETTINGS_BUCKETS
        later = [bucket_config(self._names, n, replicas) for n in nouns]
        for wanted in stream_configs(self._names, self.records, replicas) + later:
            name = wanted["name"]
            try:
                actual = (await self._broker.api(f"STREAM.INFO.{name}"))["config"]
            except errors.NotFound:
                if wanted not in later:
                    found.append(Difference(name, "", None, None))
                continue
            except errors.PermissionDenied:
                if wanted not in later:
                    raise
                continue  # a role that does not use it
            found += [
                Difference(name, key, actual.get(key), value)
                for key, value in wanted.items()
                if not _same(key, value, actual.get(key))
            ]
        return found

    async def update_stream(self, name: str, changes: Config) -> None:
        """Change some options of a stream's configuration and keep the others."""
        actual = (await self._broker.api(f"STREAM.INFO.{name}"))["config"]
        await self._broker.api(f"STREAM.UPDATE.{name}", actual | changes)

    # ---- consumers

    async def ensure_consumer(
        self,
        stream: str,
        name: str,
        subject: str,
        ack_wait: float,
        *,
        new: bool = False,
        since: float | None = None,
        labels: Mapping[str, str] | None = None,
        in_order: bool = False,
    ) -> None:
        """Create a job's consumer unless it exists; that of a paused job starts paused.

        `new`: only messages from now on; `since`: from that instant on, for a consumer that has
        vanished; `labels`: what its worker says about it, such as its app (`APP_LABEL`).
        """
        try:
            info = await self._broker.api(f"CONSUMER.INFO.{stream}.{name}", timeout=LOOK_SECONDS)
            await self._adapt(stream, info["config"], labels or {}, in_order)
            return
        except errors.NotFound as error:
            if "stream not found" in str(error):
                await self.ensure()
        config = consumer_config(name, subject, ack_wait, in_order)
        config |= {"metadata": dict(labels)} if labels else {}
        if new and since is None:
            config["deliver_policy"] = "new"
        elif new and since is not None:
            config |= {"deliver_policy": "by_start_time", "opt_start_time": rfc3339(since)}
        if await self._is_paused(name):
            config["pause_until"] = FOREVER
        await self.create_consumer(stream, config)

    async def _adapt(
        self, stream: str, config: Config, wanted: Mapping[str, str], in_order: bool
    ) -> None:
        """Update what another version of the app stored about a consumer: its labels, its order."""
        labels = config.get("metadata") or {}
        fresh = {k: v for k, v in wanted.items() if labels.get(k) != v}
        if APP_LABEL in labels:
            fresh.pop(APP_LABEL, None)  # the job does not change
        changes: Config = {"metadata": {**labels, **fresh}} if fresh else {}
        if (config.get("max_ack_pending") == 1) != in_order:
            changes["max_ack_pending"] = 1 if in_order else MAX_ACK_PENDING
        if changes:
            await self.create_consumer(stream, config | changes)

    async def _is_paused(self, name: str) -> bool:
        """Whether the job of a consumer is paused, as `status.jobs` records it."""
        job = parse_consumer(name)
        if job is None:
            return False
        return await Bucket(self._broker, self._names.schedules).get(pause_key(*job)) is not None

    async def create_consumer(self, stream: str, config: Config) -> None:
        """Create one consumer; idempotent."""
        name = config.get("durable_name") or config["name"]
        await self._broker.api(
            f"CONSUMER.CREATE.{stream}.{name}.{config['filter_subject']}",
            {"stream_name": stream, "config": config},
        )

    async def consumers(self, stream: str) -> list[dict[str, Any]]:
        """All consumers of a stream, as the server describes them."""
        found: list[dict[str, Any]] = []
        while True:
            page = await self._broker.api(f"CONSUMER.LIST.{stream}", {"offset": len(found)})
            found += page.get("consumers") or []
            if not page.get("consumers") or len(found) >= int(page.get("total", 0)):
                return found

    async def pause(self, stream: str, name: str, *, until: str = FOREVER) -> None:
        """Stop deliveries of one consumer; running handlers continue."""
        await self._broker.api(f"CONSUMER.PAUSE.{stream}.{name}", {"pause_until": until})

    async def resume(self, stream: str, name: str) -> None:
        """Let a paused consumer deliver again."""
        await self._broker.api(f"CONSUMER.PAUSE.{stream}.{name}", {})

    async def purge(self, stream: str, subject: str) -> int:
        """Remove all messages of a subject; returns how many."""
        answer = await self._broker.api(f"STREAM.PURGE.{stream}", {"filter": subject})
        return int(answer.get("purged", 0))


def _same(key: str, wanted: object, actual: object) -> bool:
    if key == "subjects" and isinstance(wanted, list) and isinstance(actual, list):
        return set(wanted) <= set(actual)
    if wanted is False or wanted == 0:
        return not actual
    return wanted == actual
