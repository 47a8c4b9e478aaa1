"""Alerts: which rules are true now, the stored board, and the channels for notices.

The board is a message in the stream with the totals of the history, which control processes may
write and readers of charts may read.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import smtplib
import ssl
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from typing import Final, NamedTuple
from urllib.parse import urlsplit

import msgspec

from holdfast import durations, notices
from holdfast.broker import Broker
from holdfast.client import Client
from holdfast.client.schedules import Schedules
from holdfast.config.alerting import AlertsConfig
from holdfast.config.option import checked_by
from holdfast.errors import BrokerError, ConfigError, NotFound
from holdfast.model import slot as slots
from holdfast.model.alert import BOARD, Alert, Board, Notice, Reading, Rule, parse_rules
from holdfast.model.lifecycle import ALIVE
from holdfast.names import H_EXPECTED, H_ROLLUP, kv_stream, kv_subject
from holdfast.notices import MailServer, Message, NotDelivered
from holdfast.status.jobs import JobInfo, Jobs
from holdfast.status.limits import Limits
from holdfast.status.messages import newest
from holdfast.status.nodes import Nodes
from holdfast.status.schedules import SlotHistory, overdue_since

LOST_SECONDS: Final = 900.0
"""How long a lost node is shown as firing; its replacement has another name."""
MISSED_SECONDS: Final = 900.0
"""How long a missed slot is shown as firing, as long as a lost node: neither ends by itself."""
LOOK_SLOTS: Final = 2_000
"""Most slots that one round checks, the newest ones: bounds a round to seconds."""
LOOK_NODES: Final = 2_000
"""Most transitions of nodes that one round checks, for the same reason."""
LATE_ROUNDS: Final = 6
"""A standby takes over after three rounds. After six, assume that no process evaluates the
rules."""
MISSED: Final = frozenset({"catch_up", "limit"})
"""The reasons for skipping a slot that mean that it was missed."""
LOST: Final = frozenset({"DISCONNECTED", "NOT_RUNNING"})
"""The states of a node that did not end by itself."""


# ---- channels


class Channel(NamedTuple):
    """A receiver of notices."""

    kind: str
    target: str
    name: str
    """A description for people, without secrets."""


class Alerting(NamedTuple):
    """The rules and channels of a configuration."""

    config: AlertsConfig
    rules: tuple[Rule, ...]
    channels: tuple[Channel, ...]

    @classmethod
    def of(cls, config: AlertsConfig) -> Alerting:
        """Check a configuration; `ConfigError` says what is wrong."""
        rules = checked_by(parse_rules, config.rules)
        lines = [" ".join(x.split()) for x in config.channels.replace(";", "\n").splitlines()]
        channels = tuple(_channel(line) for line in dict.fromkeys(lines) if line)
        if any(c.kind == "mail" for c in channels):
            url = urlsplit(config.smtp_url)
            if url.scheme not in ("smtp", "smtps") or not url.hostname:
                raise ConfigError(
                    "alerts.smtp_url is needed for mail channels: smtp://user:password@host:587"
                )
        return cls(config, rules, channels)

    async def send(self, channel: Channel, message: Message) -> None:
        """Send a message to a channel; `NotDelivered` if that fails."""
        ca = self.config.ca_file
        try:
            trust = ssl.create_default_context(cafile=ca) if ca else None
            if channel.kind == "mail":
                plain = self.config.smtp_plain == "yes"
                server = MailServer(self.config.smtp_url, self.config.mail_from, plain, trust)
                await notices.mail(message, channel.target, server)
            else:
                body = notices.slack_body if channel.kind == "slack" else notices.webhook_body
                await notices.post(channel.target, message, body(message), trust)
        except (OSError, smtplib.SMTPException, ValueError) as error:
            raise NotDelivered(str(error) or type(error).__name__) from None

    def message(self, notice: Notice, namespace: str) -> Message:
        """A notice as it is sent."""
        lines = [f"Rule:  {notice.rule}", f"Since: {_moment(notice.since)}"]
        facts: dict[str, object] = {
            "told": notice.told,
            "rule": notice.rule,
            "subjects": list(notice.subjects),
            "since": notice.since,
            "at": notice.at,
            "namespace": namespace,
        }
        if self.config.pages_url:
            facts["url"] = url = self.config.pages_url.rstrip("/") + notice.path
            lines.append(f"Page:  {url}")
        return Message(notice.id, f"[{namespace}] {notice.text}", tuple(lines), facts)


def _channel(line: str) -> Channel:
    kind, _, target = line.partition(" ")
    if kind == "mail" and target.count("@") == 1 and not set(target) & set(' ,<>"'):
        return Channel(kind, target, f"mail {target}")
    with contextlib.suppress(ValueError):
        url = urlsplit(target)
        if kind in ("webhook", "slack") and url.scheme in ("http", "https") and url.hostname:
            mark = hashlib.sha256(target.encode()).hexdigest()[:6]
            return Channel(kind, target, f"{kind} {url.hostname} ({mark})")
    raise ConfigError(
        f"alerts.channels: a channel of kind {kind[:20]!r} cannot be used: write "
        "'mail ADDRESS', 'webhook URL' or 'slack URL'"
    )


def _moment(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


# ---- the board


async def read_board(broker: Broker) -> tuple[Board, int]:
    """The board, from the stream's leader, and its revision; an empty one if there is none."""
    names = broker.names
    get = f"STREAM.MSG.GET.{names.history_index}"
    try:
        answer = await broker.api(get, {"last_by_subj": names.indexed("alerts")})
    except NotFound:
        return Board(), 0
    message = answer["message"]
    body, place = base64.b64decode(message.get("data", "")), str(message["seq"])
    board = broker.unreadable.read(BOARD.decode, names.history_index, place, body)
    return board or Board(), int(message["seq"])


async def write_board(broker: Broker, board: Board, revision: int) -> int:
    """Write the board if it is still at a revision, else `Conflict`; returns the new one."""
    headers = {H_EXPECTED: str(revision), H_ROLLUP: "sub"}
    subject = broker.names.indexed("alerts")
    return (await broker.store(subject, BOARD.encode(board), headers)).seq


class AlertsInfo(msgspec.Struct, frozen=True):
    """The board for people and programs."""

    at: float
    """When the rules were last evaluated; 0 if never."""
    by: str
    """The node that evaluated them."""
    late: bool
    """Whether that is longer ago than it should be."""
    rules: Sequence[str]
    channels: Sequence[str]
    firing: Sequence[Alert]
    pending: Sequence[Alert]
    """True, but not for as long as the rule wants."""
    waiting: Sequence[Notice]
    """Notices that a channel has not accepted yet."""
    told: Sequence[Notice]
    """The newest first."""
    unread: dict[str, str]
    """Kinds of rules that could not be evaluated in the last round, and why."""


async def alerts(broker: Broker) -> AlertsInfo:
    """What fires now, and which notices were sent."""
    board, _ = await read_board(broker)
    late = bool(board.at) and broker.server_now() - board.at > LATE_ROUNDS * max(board.every, 1.0)
    return AlertsInfo(
        board.at,
        board.by,
        late,
        board.rules,
        board.channels,
        board.firing,
        board.pending,
        board.outbox,
        board.told,
        board.unread,
    )


# ---- what is true now


class Readings:
    """Evaluates every rule by what the server knows."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._limits = Limits(client)

    async def read(self, rules: Sequence[Rule]) -> tuple[list[Reading], dict[str, str]]:
        """What is true now, and the kinds that could not be read."""
        found, unread = list[Reading](), dict[str, str]()
        for kinds, read in self._sources.items():
            wanted = [rule for rule in rules if rule.kind in kinds]
            if wanted:
                try:
                    found += await read(wanted)
                except BrokerError as error:
                    unread |= {rule.kind: str(error) for rule in wanted}
        return found, unread

    @property
    def _sources(self) -> dict[tuple[str, ...], Callable[[list[Rule]], Awaitable[list[Reading]]]]:
        return {
            ("lag", "wait", "dead_letters"): self._jobs,
            ("node_lost",): self._nodes,
            ("schedule_missed",): self._schedules,
            ("limit_saturated",): self._saturated,
        }

    async def _jobs(self, rules: list[Rule]) -> list[Reading]:
        return [
            Reading(rule.text, f"{j.group}/{j.job}", text, f"/jobs/{j.group}/{j.job}")
            for j in await Jobs(self._client).list()
            for rule in rules
            if rule.covers(f"{j.group}/{j.job}") and (text := _of_job(rule, j))
        ]

    async def _nodes(self, rules: list[Rule]) -> list[Reading]:
        since = self._client.broker.server_now() - LOST_SECONDS
        found: dict[str, str] = {}
        for step in await Nodes(self._client).recent(LOOK_NODES):
            if step.at < since:
                break
            if step.before in ALIVE and step.after in LOST:
                what = f"{step.role} {step.node}" + (f" on {step.host}" if step.host else "")
                found[step.node] = f"{what} was lost: {step.reason}"
        return [
            Reading(rule.text, node, text, f"/cluster/{node}")
            for node, text in found.items()
            for rule in rules
            if rule.covers(node)
        ]

    async def _schedules(self, rules: list[Rule]) -> list[Reading]:
        client, now = self._client, self._client.broker.server_now()
        schedules = [s for s in await Schedules(client).list() if s.active]
        progress = await SlotHistory(client).progress()
        found: dict[str, str] = {}
        for schedule in schedules:
            if late := overdue_since([schedule], progress.watermark, now):
                late_text = durations.text(round(late))
                found[schedule.name] = f"a slot of {schedule.name} is {late_text} overdue"
        missed = await self._missed(now - MISSED_SECONDS)
        return [
            Reading(rule.text, name, text, f"/schedules/{name}")
            for name, text in (missed | found).items()
            for rule in rules
            if rule.covers(name)
        ]

    async def _missed(self, since: float) -> dict[str, str]:
        """Schedules with a slot that was recently skipped because no scheduler ran to fire it."""
        broker, found = self._client.broker, dict[str, str]()
        stream, prefix = kv_stream(broker.names.slots), kv_subject(broker.names.slots, "")
        looked = 0
        async for kept in newest(broker, stream, f"{prefix}slot.>"):
            looked += 1
            if kept.stored < since or looked > LOOK_SLOTS:
                break
            key = kept.subject.removeprefix(prefix)
            read = functools.partial(slots.decode_at, key)
            at = broker.unreadable.read(read, stream, key, kept.body) if kept.body else None
            if at and at[2].state == "skipped" and at[2].reason in MISSED:
                what = f"{at[2].count} slots" if at[2].count > 1 else "a slot"
                found.setdefault(at[0], f"{what} of {at[0]} missed at {_moment(at[1])}")
        return found

    async def _saturated(self, rules: list[Rule]) -> list[Reading]:
        return [
            Reading(
                rule.text,
                one.name,
                f"{one.waiting:,} runs wait for the limit {one.name} ({one.held:,} hold a place)",
                f"/limits/{one.name}",
            )
            for one in await self._limits.list()
            for rule in rules
            if one.waiting and rule.covers(one.name)
        ]


def _of_job(rule: Rule, job: JobInfo) -> str:
    """What a rule says about a job, as a sentence; empty if it is not true."""
    name = job.job if job.group == "default" else f"{job.group}/{job.job}"
    if rule.kind == "lag" and job.waiting > rule.above:
        return f"{name} has {job.waiting:,} runs waiting"
    if rule.kind == "wait" and (job.oldest_seconds or 0.0) > rule.above:
        age = durations.text(round(job.oldest_seconds or 0.0))
        return f"the oldest run of {name} has been waiting for {age}"
    if rule.kind == "dead_letters" and job.dead > rule.above:
        return f"{name} has {job.dead:,} dead letter{'s' if job.dead != 1 else ''}"
    return ""
