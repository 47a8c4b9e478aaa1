"""Every name on the wire: streams, subjects, buckets, keys, consumers, headers, run ids.

All of them are built and parsed here and nowhere else. A name that came from outside (a job, a
group, an event, a node) must match a narrow pattern; free text (a user's key) is encoded, so that
no text can reach a subject as a wildcard, a dot or a line break.

A run id is one subject token: a generated id (`r1x…`), or `<job>/<key>` for a keyed run, with the
group in front when it is not `default`. The separator is `/` because job and group names cannot
contain it.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import os
import re
import secrets
import time
from dataclasses import dataclass

from holdfast.errors import InvalidName

DEFAULT_NAMESPACE = "hf"
DEFAULT_GROUP = "default"

H_MSG_ID = "Nats-Msg-Id"
H_EXPECTED = "Nats-Expected-Last-Subject-Sequence"
H_EXPECTED_SUBJECT = "Nats-Expected-Last-Subject-Sequence-Subject"
H_TTL = "Nats-TTL"
H_SCHEDULE = "Nats-Schedule"
H_SCHEDULE_TARGET = "Nats-Schedule-Target"
H_SEQUENCE = "Nats-Sequence"
H_ROLLUP = "Nats-Rollup"
H_BATCH_ID = "Nats-Batch-Id"
H_BATCH_SEQUENCE = "Nats-Batch-Sequence"
H_BATCH_COMMIT = "Nats-Batch-Commit"
H_RUN = "Hf-Run"
H_ATTEMPT = "Hf-Attempt"
H_FAILURES = "Hf-Failures"
H_CREATED = "Hf-Created"
H_REASON = "Hf-Reason"
H_ERROR = "Hf-Error"
H_TRACEBACK = "Hf-Traceback"
H_ATTEMPTS = "Hf-Attempts"
H_CRASHES = "Hf-Crashes"
H_SUBJECT = "Hf-Subject"
H_DEAD_AT = "Hf-Dead-At"
H_OBJECT = "Hf-Object"
H_EVENT = "Hf-Event"
H_CAUSE = "Hf-Cause"
H_PARENT = "Hf-Parent"
"""On a child of a flow: the flow that waits for it."""
H_WAKE = "Hf-Wake"
"""On a message without a payload: "look at your flow again", and why."""
H_SLOT = "Hf-Slot"
H_DEBOUNCE = "Hf-Debounce"
"""On a debounced run: its burst."""
H_COMMAND = "Hf-Command"
H_AGENT = "Hf-Agent"
H_EPOCH = "Hf-Epoch"
H_EXPIRES = "Hf-Expires"
H_SIGNATURE = "Hf-Signature"
H_SIGNATURE_2 = "Hf-Signature-2"
H_USER = "Hf-User"
H_ROLE = "Hf-Role"
H_KEY = "Hf-Key"
H_CERTIFICATES = "Hf-Certificates"
H_NONCE = "Hf-Nonce"
H_QUEUE = "Hf-Queue"
"""On a dead letter of a taskiq queue: the queue's stream. A replay sends the letter unchanged, not
as a run."""
H_TASK = "Hf-Task"
H_TASK_ID = "Hf-Task-Id"
H_KV_OPERATION = "KV-Operation"
H_MARKER = "Nats-Marker-Reason"

CONNECTIONS = "$SYS.REQ.ACCOUNT.PING.CONNZ"
"""Every server answers which connections of the requester's account it has."""

OWN_HEADERS = "Hf-"
SERVER_HEADERS = "Nats-"

_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_-]{0,63}")
_EVENT = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_-]{0,63}(\.[a-zA-Z0-9][a-zA-Z0-9_-]{0,63}){0,7}")
_USER = re.compile(r"[a-z]{1,32}(-[a-zA-Z0-9][a-zA-Z0-9_-]{0,63})?")
_NAMESPACE = re.compile(r"[a-z][a-z0-9-]{0,31}")
_RUN = re.compile(r"[a-zA-Z0-9_=/-]{1,400}")
_KEY = re.compile(r"(?=.{1,400}\Z)[a-zA-Z0-9_=/-]+(\.[a-zA-Z0-9_=/-]+)*")
_HEADER_NAME = re.compile(r"[!-9;-~]{1,128}")
_PULL_INBOX = re.compile(r"[a-zA-Z0-9_-]+(\.[a-zA-Z0-9_-]+){0,15}\.pull\.[0-9a-f]{22}")
_PLAIN = re.compile(r"[a-zA-Z0-9_-]+")
_LONGEST_KEY = 160
"""Longer keys are hashed: with group and job, a run id stays below its 400 characters."""
_B62 = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


def check_name(value: object, what: str) -> str:
    """A job, group or node name: refuse what a subject token cannot carry."""
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise InvalidName(
            f"{what} {_shown(value)} is not usable: letters, digits, '-' and '_', "
            "starting with a letter or digit, at most 64 characters"
        )
    return value


def check_user(value: object) -> str:
    """The name of a user of the server: a role, or a role and a name (`agent-web1`)."""
    if not isinstance(value, str) or not _USER.fullmatch(value):
        raise InvalidName(f"user {_shown(value)} is not usable: a role, or 'role-name'")
    return value


def check_event(value: object) -> str:
    """An event name: like a job's, with dots allowed between its parts."""
    if not isinstance(value, str) or not _EVENT.fullmatch(value):
        raise InvalidName(
            f"event {_shown(value)} is not usable: letters, digits, '-' and '_', "
            "in up to eight parts separated by single dots"
        )
    return value


def check_event_id(value: object) -> str:
    """The id under which an event is published: a header carries it as it is."""
    if not isinstance(value, str) or not value.isprintable() or len(value) > 1000:
        raise InvalidName(
            f"event id {_shown(value)} is not usable: text without line breaks or control "
            "characters, at most 1000"
        )
    return value


def check_key(value: object) -> str:
    """A key of a program's own bucket: words with single dots between them."""
    if not isinstance(value, str) or not _KEY.fullmatch(value):
        raise InvalidName(
            f"key {_shown(value)} is not usable: letters, digits, '-', '_', '=' and '/', in parts "
            "separated by single dots, at most 400 characters"
        )
    return value


def check_run(value: object) -> str:
    """A run id as it was given out by `enqueue`."""
    if not isinstance(value, str) or not _RUN.fullmatch(value):
        raise InvalidName(
            f"run id {_shown(value)} is not one that Holdfast gave out: it has "
            "letters, digits, '-', '_', '=' and '/', at most 400"
        )
    return value


def check_header(name: object, value: object) -> None:
    """A user's own header: refuse reserved names and anything that could forge a line."""
    if not isinstance(name, str) or not _HEADER_NAME.fullmatch(name):
        raise InvalidName(f"header name {_shown(name)} is not usable: printable ASCII without ':'")
    if name.lower().startswith((OWN_HEADERS.lower(), SERVER_HEADERS.lower())):
        raise InvalidName(f"header {name!r} is reserved: 'Hf-' and 'Nats-' belong to the system")
    if not isinstance(value, str) or not value.isprintable():
        raise InvalidName(f"header {name!r} must be text without line breaks or control characters")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def encode(text: str) -> str:
    """Free text as one subject token; other characters become `=XX`, long text a hash."""
    if _PLAIN.fullmatch(text) and len(text) <= _LONGEST_KEY:
        return text
    raw = text.encode("utf-8", "surrogatepass")
    out = "".join(chr(b) if _PLAIN.fullmatch(chr(b)) else f"={b:02X}" for b in raw)
    if 0 < len(out) <= _LONGEST_KEY:
        return out
    return "=h" + hashlib.sha256(raw).hexdigest()


def decode(token: str) -> str:
    """The text that `encode` was given; hashes and foreign tokens stay as they are."""
    if token.startswith("=h"):
        return token
    raw = token.encode("utf-8", "surrogatepass")
    raw = re.sub(rb"=([0-9A-F]{2})", lambda m: bytes.fromhex(m[1].decode()), raw)
    try:
        return raw.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return token


def _b62(number: int) -> str:
    out = ""
    while True:
        number, digit = divmod(number, 62)
        out = _B62[digit] + out
        if not number:
            return out


def pull_inbox(prefix: str, token: str) -> str:
    """The subject below which a process receives what it pulls, separate from other answers.

    So a coordinator can be allowed to receive what is sent to a dead worker, and nothing else.
    """
    return f"{prefix}.pull.{token}"


def inbox_probe(inbox: str) -> str:
    """A probe subject in a pull inbox: it shows whether anybody listens there."""
    return f"{inbox}.0.probe"


def is_pull_inbox(subject: str) -> bool:
    """Whether a subject from a record is one that `pull_inbox` made."""
    return bool(_PULL_INBOX.fullmatch(subject))


class IdMaker:
    """Unique ids without asking the system's random source each time.

    One random prefix per process and a counter. The prefix starts with the second of creation, so
    that ids of one day sort roughly by age. A forked child makes a new prefix: with its parent's,
    the two would give the same id to two runs, and one would be dropped as a repeat.
    """

    def __init__(self) -> None:
        self._state = self._start()

    def _start(self) -> tuple[int, str, itertools.count[int]]:
        second = _b62(int(time.time())).rjust(6, "0")
        return os.getpid(), second + _b62(secrets.randbits(64)).rjust(11, "0"), itertools.count()

    def __call__(self, kind: str = "r") -> str:
        pid, prefix, count = self._state
        if pid != os.getpid():
            _, prefix, count = self._state = self._start()
        return f"{kind}{prefix}{_b62(next(count))}"


def keyed_run(group: str, job: str, key: object) -> str:
    """The run id of a key: the same job and key always give the same run."""
    if not isinstance(key, str) or not key:
        raise InvalidName("key must be a text that is not empty")
    prefix = job if group == DEFAULT_GROUP else f"{group}/{job}"
    return f"{prefix}/{encode(key)}"


def spelled_runs(text: str) -> list[str]:
    """The run ids that an unencoded job and key such as `ocr/d2:left` may mean.

    The id itself comes first if it is one, then a key of a job, then one of a group's job.
    """
    found = [text] if _RUN.fullmatch(text) else []
    parts = text.split("/")
    for home in (1, 2):
        prefix, key = parts[:home], "/".join(parts[home:])
        if key and all(_NAME.fullmatch(part) for part in prefix):
            found.append("/".join((*prefix, encode(key))))
    return list(dict.fromkeys(found)) or [text]


def sequence_run(stream_sequence: int, timestamp_ns: int) -> str:
    """The run id of a message that carries none: where and when the stream stored it."""
    return f"s{stream_sequence}-{_b62(timestamp_ns)}"


def event_run(group: str, job: str, event_id: str) -> str:
    """The run id of a subscriber: derived from the event, so that repeats are detected.

    `encode` never makes `=e`, so no user's key can be mistaken for it.
    """
    prefix = job if group == DEFAULT_GROUP else f"{group}/{job}"
    return f"{prefix}/=e{encode(event_id)}"


def child_run(group: str, job: str, parent: str, number: int, index: int) -> str:
    """The run id of a flow's child: always the same, so that a replay sends no second one.

    The parent is hashed: children of children would otherwise have ever longer ids.
    """
    prefix = job if group == DEFAULT_GROUP else f"{group}/{job}"
    return f"{prefix}/=c{hashlib.sha256(parent.encode()).hexdigest()[:20]}-{number}-{index}"


def wake_message_id(run: str, mark: str) -> str:
    """The message id of a wake; `mark` says who sends it and for which wait."""
    return f"{run}.wake.{mark}"


def is_event_run(run: str) -> bool:
    """Whether a run id belongs to a subscriber."""
    return run.rpartition("/")[2].startswith("=e")


def is_keyed_by_sender(run: str, group: str, job: str) -> bool:
    """Whether a run id is a key of this job that its sender chose or computed."""
    prefix = job if group == DEFAULT_GROUP else f"{group}/{job}"
    return run.startswith(f"{prefix}/") and not is_event_run(run)


def is_slot_or_trigger(run: str) -> bool:
    """Whether a run id belongs to a slot of a schedule, or to a run triggered by hand."""
    return run.rpartition("/")[2].startswith(("=t", "=m"))


def slot_run(schedule: str, time: str) -> str:
    """The run id of a slot: `<schedule>/=t<UTC time>`.

    `encode` never makes `=t`, so no user's key can be mistaken for a slot.
    """
    return f"{schedule}/=t{time}"


def parse_slot_run(run: str) -> tuple[str, str] | None:
    """Schedule and time of a slot's run id, or None when it is another kind of run."""
    schedule, found, time = run.partition("/=t")
    return (schedule, time) if found and _NAME.fullmatch(schedule) and time else None


def trigger_run(schedule: str, id: str) -> str:
    """The run id of a schedule that was triggered by hand."""
    return f"{schedule}/=m{id}"


def schedule_key(schedule: str) -> str:
    """The key of a schedule in its bucket."""
    return f"schedule.{schedule}"


def _after(first: str, key: str) -> tuple[str, str] | None:
    """The two parts of a key that follow its first one, or None."""
    parts = key.split(".")
    return (parts[1], parts[2]) if len(parts) == 3 and parts[0] == first else None


APPS = "app"
"""The first part of the keys of registrations."""


def app_key(app: str) -> str:
    """The key under which an app's registration of its schedules is kept."""
    return f"{APPS}.{app}"


REFUSALS = "refused"
"""The first part of the keys of refused registrations."""


def refusal_key(app: str) -> str:
    """The key that says why the schedules of an app could not be registered."""
    return f"{REFUSALS}.{app}"


PAUSES = "pause"
"""The first part of the keys of pauses."""


def pause_key(group: str, job: str) -> str:
    """The key, in the schedules' bucket, that says a job is paused."""
    return f"{PAUSES}.{group}.{job}"


def parse_pause_key(key: str) -> tuple[str, str] | None:
    """Group and job of a pause's key, or None."""
    return _after(PAUSES, key)


def release_order(release: str) -> tuple[int, ...]:
    """A release as something that can be compared."""
    return tuple(int(part) for part in release.split(".")) if release else ()


RULES = "rule"
"""The first part of the keys of limits' rules."""
GATES = "gate"
"""The first part of the keys of limits' gates."""


def rule_key(limit: str) -> str:
    """The key, in the limits' bucket, of what a limit allows."""
    return f"{RULES}.{limit}"


def gate_key(limit: str, key: str) -> str:
    """The key, in the limits' bucket, of one key of a limit."""
    return f"{GATES}.{limit}.{key}"


def parse_gate_key(key: str) -> tuple[str, str] | None:
    """Limit and key of a gate's key, or None."""
    return _after(GATES, key)


def slot_key(schedule: str, time: str) -> str:
    """The key of a slot in its bucket."""
    return f"slot.{schedule}.{time}"


def parse_slot_key(key: str) -> tuple[str, str] | None:
    """Schedule and time of a slot's key, or None."""
    return _after("slot", key)


def marker_key(schedule: str, slot: str) -> str:
    """A taskiq schedule's slot, as in message ids and in the marks of earlier versions."""
    return f"{encode(schedule)}.{encode(slot)}"


def sent_keys(leader_key: str) -> str:
    """The first part of the keys that record what the taskiq schedulers of a leader key have
    sent."""
    return f"sent.{encode(leader_key)}"


def sent_key(leader_key: str, schedule: str) -> str:
    """The key of the last slot of a taskiq schedule that was sent."""
    return f"{sent_keys(leader_key)}.{encode(schedule)}"


def attempts_key(stream: str, consumer: str, sequence: int) -> str:
    """The key of the attempts at a taskiq message that was delivered more than once."""
    return f"attempts.{encode(stream)}.{encode(consumer)}.{sequence}"


def floor_key(stream: str, consumer: str) -> str:
    """The key that says up to where a taskiq queue was acknowledged."""
    return f"floor.{encode(stream)}.{encode(consumer)}"


def term_key(role: str) -> str:
    """The key of a role's term: its revision is the epoch that fences what the leader writes."""
    return f"term.{role}"


def progress_key(role: str) -> str:
    """The key under which a role's leaders record their progress."""
    return f"progress.{role}"


SETTINGS_REVISION = "revision"
"""The key of the current revision of the settings: the switch from one snapshot to the next."""


EPOCHS_RAISED = "epochs-raised"
"""The key that a restore writes to let revisions continue above a number."""


def settings_file_key(sha256: str) -> str:
    """The key of a file of the settings: its content's hash, so that it never changes."""
    return f"file.{sha256}"


def settings_manifest_key(sha256: str) -> str:
    """The key of a manifest of the settings."""
    return f"manifest.{sha256}"


def settings_history_key(number: int) -> str:
    """The key of an earlier revision of the settings."""
    return f"history.{number}"


def settings_secret_key(version: str) -> str:
    """The key of a secret as sealed to the account, by its version."""
    return f"secret.{version}"


def join_key(agent: str) -> str:
    """The key of the host that asked to become an agent."""
    return f"host.{agent}"


def token_key(token: str) -> str:
    """The key of a token's record."""
    return f"token.{token}"


def active_key(run: str) -> str:
    """The key that says a fan-out run has not ended, and who owns it."""
    return f"active.{run}"


def fleet_key(run: str) -> str:
    """The key of a fan-out run's record."""
    return f"run.{run}"


def return_key(run: str, agent: str) -> str:
    """The key of one agent's return."""
    return f"{run}.{agent}"


def parse_return_key(key: str) -> tuple[str, str] | None:
    """Run and agent of a return's key, or None."""
    parts = key.split(".")
    return (parts[0], parts[1]) if len(parts) == 2 else None


def last_token(subject: str) -> str:
    """The last part of a subject: the agent that permissions allow to publish there."""
    return subject.rpartition(".")[2]


def attempt_message_id(run: str, attempt: int) -> str:
    """The message id of a publish: the run itself first, `<run>.<attempt>` for each re-publish."""
    return run if attempt <= 1 else f"{run}.{attempt}"


def event_message_id(run: str, event: str, number: int) -> str:
    """The message id of the n-th event of that name that a run publishes."""
    return f"{run}.{event}.{number}"


GRANTED = "granted"
QUEUES = ("high", "normal", "low", GRANTED)
"""A job's additional queues: for runs with another priority than the job's, and for runs of an
ordered job that have their place."""


def consumer(group: str, job: str, event: str = "", queue: str = "") -> str:
    """The durable consumer of one of a job's queues, or of its subscription to an event.

    `=` cannot occur in any of the names, and no event starts with `:`, so no two collide.
    """
    part = f":{queue}" if queue else event.replace(".", ":")
    return f"{group}={job}={part}" if part else f"{group}={job}"


def parse_consumer(name: str) -> tuple[str, str] | None:
    """Group and job of a consumer, or None when it is not one of ours."""
    parts = name.split("=")
    if len(parts) in (2, 3) and _NAME.fullmatch(parts[0]) and _NAME.fullmatch(parts[1]):
        return parts[0], parts[1]
    return None


@dataclass(frozen=True, slots=True)
class Names:
    """The wire names of one namespace."""

    namespace: str = DEFAULT_NAMESPACE

    def __post_init__(self) -> None:
        given: object = self.namespace
        if not isinstance(given, str) or not _NAMESPACE.fullmatch(given):
            raise InvalidName(
                f"namespace {_shown(self.namespace)} is not usable: lower-case letters, digits "
                "and '-', starting with a letter, at most 32 characters"
            )

    def _stream(self, noun: str) -> str:
        return f"{self.namespace.upper()}_{noun}"

    @property
    def jobs(self) -> str:
        return self._stream("JOBS")

    @property
    def events(self) -> str:
        return self._stream("EVENTS")

    @property
    def dead(self) -> str:
        return self._stream("DEAD")

    @property
    def ledger(self) -> str:
        return self._stream("LEDGER")

    @property
    def run_logs(self) -> str:
        """The stream of log lines of runs."""
        return self._stream("RUN_LOGS")

    @property
    def history(self) -> str:
        """The stream of runs that have ended."""
        return self._stream("HISTORY")

    @property
    def history_index(self) -> str:
        """The stream that says where in the history a run is, and what the history adds up to."""
        return self._stream("HISTORY_INDEX")

    @property
    def flows(self) -> str:
        """The stream of flows' journals, of events with a key, and of who waits for them."""
        return self._stream("FLOWS")

    def flow(self, run: str) -> str:
        """Where a flow's journal is."""
        return f"{self.namespace}.flow.{run}"

    def flow_children(self, run: str, number: int | str) -> str:
        """The subject for ends of the children that an operation of a flow waits for."""
        return f"{self.namespace}.flow.{run}.{number}"

    def parse_flow_children(self, subject: str) -> tuple[str, int] | None:
        """The run and the number of a subject of children's ends, or None."""
        head, _, number = subject.rpartition(".")
        run = self.parse_flow(head)
        return (run, int(number)) if run and number.isascii() and number.isdigit() else None

    def flow_stop(self, run: str) -> str:
        """The subject that records a flow's cancellation."""
        return f"{self.namespace}.flow.{run}.stop"

    def signal(self, event: str, key: str) -> str:
        """Where an event with a key is stored; the event's dots are encoded."""
        return f"{self.namespace}.signal.{encode(event)}.{encode(key)}"

    @property
    def signal_any(self) -> str:
        """Every event with a key."""
        return f"{self.namespace}.signal.>"

    def signal_wait(self, event: str, key: str, run: str) -> str:
        """The subject that records that a flow waits for an event."""
        return f"{self.namespace}.wait.{encode(event)}.{encode(key)}.{run}"

    def waits_of(self, signal: str) -> str:
        """The flows that wait for a stored event, by its subject."""
        return f"{self.namespace}.wait.{signal.removeprefix(f'{self.namespace}.signal.')}.*"

    def parse_flow(self, subject: str) -> str | None:
        """The run of a journal's subject, or None."""
        parts = subject.split(".")
        return parts[2] if len(parts) == 3 and parts[:2] == [self.namespace, "flow"] else None

    def bucket(self, noun: str) -> str:
        return f"{self.namespace}_{noun}"

    @property
    def runs(self) -> str:
        return self.bucket("runs")

    @property
    def nodes(self) -> str:
        return self.bucket("nodes")

    @property
    def objects(self) -> str:
        return self.bucket("objects")

    @property
    def schedules(self) -> str:
        return self.bucket("schedules")

    @property
    def slots(self) -> str:
        return self.bucket("slots")

    @property
    def leases(self) -> str:
        return self.bucket("leases")

    @property
    def limits(self) -> str:
        """The rules and gates of limits; coordinators create it, or a worker with limits."""
        return self.bucket("limits")

    @property
    def settings(self) -> str:
        """Files, manifests and the revision: any agent reads it, only publishers write it."""
        return self.bucket("settings")

    @property
    def secrets(self) -> str:
        """Sealed secrets, key: the agent's id. An agent may read its own key only, by a direct
        get of that subject; its changes are repeated without their content."""
        return self.bucket("secrets")

    @property
    def joins(self) -> str:
        """Hosts that asked to become agents, and the tokens they used."""
        return self.bucket("joins")

    @property
    def join(self) -> str:
        """Where a host with a token asks to become an agent."""
        return f"{self.namespace}.join.ask"

    @property
    def applied(self) -> str:
        """Each agent's report on the settings, key: the agent's id, which only it writes."""
        return self.bucket("applied")

    def data(self, name: str) -> str:
        """A bucket of a program."""
        return self.bucket(f"data_{name}")

    @property
    def taskiq_dead(self) -> str:
        """The stream with earlier versions' dead letters of taskiq queues."""
        return self._stream("TASKIQ_DEAD")

    def taskiq_dead_letter(self, subject: str = "") -> str:
        """Where a taskiq queue's dead letters go; all of them when no subject is named."""
        return f"{self.namespace}.taskiq.dead.{encode(subject) if subject else '>'}"

    @property
    def taskiq_slots(self) -> str:
        """The bucket that says which slots of taskiq's schedules were sent."""
        return self.bucket("taskiq_slots")

    @property
    def taskiq_queues(self) -> str:
        """The bucket of attempts and acknowledged positions of taskiq queues."""
        return self.bucket("taskiq_queues")

    def job(self, group: str, job: str, queue: str = "") -> str:
        """One of a job's queues; by default its own."""
        return f"{self.namespace}.job.{group}.{job}" + (f".{queue}" if queue else "")

    def queues(self, group: str = "*", job: str = "*") -> tuple[str, ...]:
        """Patterns that match all queues of a job, or of all jobs of a group."""
        if job == "*":
            return (f"{self.namespace}.job.{group}.>",)
        return self.job(group, job), self.job(group, job, "*")

    def later(self, group: str, job: str, run: str, attempt: int | str) -> str:
        return f"{self.namespace}.later.{group}.{job}.{run}.{attempt}"

    def quiet(self, group: str, job: str, key: str) -> str:
        """Where the last run of a burst waits; `encode` never makes `=d`, so it is no run."""
        return self.later(group, job, key if key == "*" else f"=d{key}", "quiet")

    def line(self, limit: str, key: str, run: str) -> str:
        """Where a run waits for a place; one token shorter than `later`, so the two never match."""
        return f"{self.namespace}.later.{limit}.{key}.{run}"

    @property
    def later_or_line(self) -> str:
        """Everything that waits for a time or a place."""
        return f"{self.namespace}.later.>"

    def canary(self, group: str, node: str) -> str:
        return f"{self.namespace}.canary.{group}.{node}"

    def event(self, name: str) -> str:
        return f"{self.namespace}.event.{name}"

    def dead_letter(self, group: str, job: str) -> str:
        return f"{self.namespace}.dead.{group}.{job}"

    def ended(self, group: str, job: str, state: str) -> str:
        """Where the ends of runs are appended to the history."""
        return f"{self.namespace}.ended.{group}.{job}.{state}"

    def indexed(self, part: int | str) -> str:
        """Where one part of the history's index is; its `head`, a `minute`, an `hour`, `counts`."""
        return f"{self.namespace}.indexed.{part}"

    def log(self, *parts: str) -> str:
        return ".".join((self.namespace, "log", *parts))

    def run_log(self, run: str) -> str:
        """Where the log lines of a run go."""
        return f"{self.namespace}.runlog.{run}"

    def cancel(self, run: str) -> str:
        return f"{self.namespace}.run.{run}.cancel"

    @property
    def fleet(self) -> str:
        return self.bucket("fleet")

    @property
    def returns(self) -> str:
        return self.bucket("returns")

    @property
    def agents(self) -> str:
        """The records of agents. Separate from the nodes, whose records are acted upon: an agent
        could claim there to be a worker, with messages to give back when it is lost."""
        return self.bucket("agents")

    @property
    def facts(self) -> str:
        return self.bucket("facts")

    def dispatch(self, verb: str) -> str:
        """Where dispatchers take requests, each by one of them: `run`, `cancel`, `resolve`."""
        return f"{self.namespace}.dispatch.{verb}"

    @property
    def handover(self) -> str:
        """Where a dispatcher announces that it is leaving."""
        return f"{self.namespace}.dispatchers.handover"

    def agent(self, agent: str, verb: str) -> str:
        """Where an agent takes commands: `exec`, `cancel`."""
        return f"{self.namespace}.agent.{agent}.{verb}"

    def ack(self, run: str, agent: str) -> str:
        """Where an agent says that it has accepted a command, or why not."""
        return f"{self.namespace}.run.{run}.ack.{agent}"

    def returned(self, run: str, agent: str) -> str:
        """Where an agent sends its return; the server keeps it as key `<run>.<agent>`."""
        return f"{self.namespace}.run.{run}.return.{agent}"

    def node(self, node: str, verb: str) -> str:
        return f"{self.namespace}.node.{node}.{verb}"

    def changed(self, bucket: str, key: str) -> str:
        """Where the server republishes each write to a bucket."""
        return f"{self.namespace}.kv.{bucket}.{key}"

    def parse_job(self, subject: str) -> tuple[str, str] | None:
        """Group and job of one of a job's queues, or None."""
        queue = self.parse_queue(subject)
        return self._parse(subject.removesuffix(f".{queue}") if queue else subject, "job")

    def parse_queue(self, subject: str) -> str:
        """The additional queue of a job that a subject belongs to; empty for the job's own queue
        and for other subjects."""
        parts = subject.split(".")
        ours = len(parts) == 5 and parts[:2] == [self.namespace, "job"]
        return parts[4] if ours and parts[4] in QUEUES else ""

    def parse_dead(self, subject: str) -> tuple[str, str] | None:
        """Group and job of a dead letter's subject, or None."""
        return self._parse(subject, "dead")

    def parse_ended(self, subject: str) -> tuple[str, str, str] | None:
        """Group, job and state of a subject of the history, or None."""
        parts = subject.split(".")
        if len(parts) == 5 and parts[:2] == [self.namespace, "ended"]:
            return parts[2], parts[3], parts[4]
        return None

    def parse_later(self, subject: str) -> tuple[str, str, str] | None:
        """Group, job and run of a parked message's subject, or None."""
        parts = subject.split(".")
        if len(parts) == 6 and parts[:2] == [self.namespace, "later"]:
            return parts[2], parts[3], parts[4]
        return None

    def parse_delayed(self, subject: str) -> tuple[str, str] | None:
        """Group and job of a message that is not due yet and was never attempted, or None."""
        where = self.parse_later(subject)
        first = subject.rpartition(".")[2] in ("1", "quiet")
        return where[:2] if where and first else None

    def parse_line(self, subject: str) -> tuple[tuple[str, str], str] | None:
        """The gate and the run of a message that waits for a place, or None."""
        parts = subject.split(".")
        if len(parts) == 5 and parts[:2] == [self.namespace, "later"]:
            return (parts[2], parts[3]), parts[4]
        return None

    def parse_event(self, subject: str) -> str | None:
        """The event of an event subject, or None."""
        prefix = f"{self.namespace}.event."
        return subject[len(prefix) :] if subject.startswith(prefix) else None

    def takes_acks(self, subject: str) -> bool:
        """Whether a subject from a record acknowledges messages of ours.

        `$JS.ACK.<stream>.…`, or with domain and account in front of the stream.
        """
        parts = subject.split(".")
        if parts[:2] != ["$JS", "ACK"] or len(parts) < 9 or "" in parts:
            return False
        return parts[2 if len(parts) == 9 else 4] in (self.jobs, self.events)

    def parse_cancel(self, subject: str) -> str:
        """The run of a cancel subject."""
        return subject.split(".")[2]

    def _parse(self, subject: str, noun: str) -> tuple[str, str] | None:
        parts = subject.split(".")
        if len(parts) == 4 and parts[:2] == [self.namespace, noun]:
            return parts[2], parts[3]
        return None


def result_object(run: str, epoch: int) -> str:
    """The object of one holder's large result: a replaced holder writes another one."""
    return f"result/{run}/{epoch}"


def step_key(run: str, generation: int, kind: str, n: int) -> str:
    """The idempotency key of a step or a compensation: another one in each life of a flow's id."""
    life = f"{run}.{generation}" if generation else run
    return f"{life}.{kind}.{n}"


def step_object(run: str, n: int, epoch: int) -> str:
    """The object of one holder's large result of a flow's step."""
    return f"flow/{run}/{n}/{epoch}"


def body_object(run: str, mark: str) -> str:
    """The object of an `at_most_once` run's large payload; `mark` is unique to its worker."""
    return f"body/{run}/{mark}"


def dead_object(message_id: str) -> str:
    """The object of a dead letter's body, when it is too large for a message with its headers."""
    return f"dead/{message_id}"


def object_stream(bucket: str) -> str:
    """The stream behind an object bucket."""
    return f"OBJ_{bucket}"


def object_chunks(bucket: str, id: str) -> str:
    """The subject of an object's chunks; `>` for those of all."""
    return f"$O.{bucket}.C.{id}"


def object_meta(bucket: str, name: str | None) -> str:
    """The subject of an object's record; None for those of all."""
    token = ">" if name is None else base64.urlsafe_b64encode(name.encode()).decode()
    return f"$O.{bucket}.M.{token}"


def is_literal(key: str) -> bool:
    """Whether a key has no wildcards. The server stores `*` and `>` as keys, and reads, compares
    and purges every key that they match."""
    return not any(token in ("*", ">") for token in key.split("."))


def kv_subject(bucket: str, key: str) -> str:
    """The subject under which a bucket's stream stores a key."""
    return f"$KV.{bucket}.{key}"


def kv_stream(bucket: str) -> str:
    """The stream behind a bucket."""
    return f"KV_{bucket}"


def kv_key(bucket: str, subject: str) -> str:
    """The key of a stored subject; empty when it is not one of this bucket."""
    prefix = f"$KV.{bucket}."
    return subject[len(prefix) :] if subject.startswith(prefix) else ""
