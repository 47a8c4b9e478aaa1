"""The codec: whatever the bytes are, a reader gets a record or `Unreadable`, and nothing else."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.client import once
from holdfast.client.schedules import REGISTRATION
from holdfast.errors import BrokerError, Unreadable
from holdfast.model import codec, fleet, lease, node, run, schedule, slot
from holdfast.model.codec import DEEPEST, JSON, LARGEST_BYTES, Codec
from holdfast.model.dead import ATTEMPTS, TEXT
from holdfast.ownership.membership import PONG
from holdfast.status.audit import LINE
from holdfast.web.auth import SESSION


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of record, and bytes of it that are good."""

    name: str
    codec: Codec[Any]
    good: bytes


def kinds() -> list[Kind]:
    found: list[tuple[str, Any, bytes]] = [
        ("run", run.CODEC, b'{"state":"running","group":"g","job":"j","started":1.0,"result":[1]}'),
        ("node", node.CODEC, b'{"id":"n","role":"worker","since":1.0,"held":[["r",1,"x"]]}'),
        ("transition", node.TRANSITION, b'{"node":"n","role":"r","group":"g","before":"CREATED",'
         b'"after":"RUNNING","reason":"","by":"n","at":1.0}'),
        ("slot", slot.CODEC, b'{"state":"planned","due":1.0,"body":{"a":1},"headers":{"x":"y"}}'),
        ("progress", slot.PROGRESS, b'{"watermark":1.0,"seen":2}'),
        ("schedule", schedule.CODEC, b'{"name":"s","job":"j","every":60,"payload":{"a":[1]}}'),
        ("registration", REGISTRATION, b'{"release":"1.2","names":["a"],"at":1.0}'),
        ("lease", lease.LEASE, b'{"holder":"h","token":"t","since":1.0}'),
        ("term", lease.TERM, b'{"holder":"h","token":"t","since":1.0}'),
        ("fleet run", fleet.RUN, b'{"request":{"run":"f1","target":"*","function":"ping"},'
         b'"status":"running","targets":["a"],"created":1.0}'),
        ("request", fleet.REQUEST, b'{"run":"f1","target":"*","function":"ping","args":[1]}'),
        ("return", fleet.RETURN, b'{"run":"f1","agent":"a","outcome":"ok","value":[1],"at":1.0}'),
        ("ack", fleet.ACK, b'{"status":"accepted","epoch":1}'),
        ("order", fleet.ORDER, b'{"function":"ping","args":[1],"deadline":1.0}'),
        ("active", fleet.ACTIVE, b'{"owner":"d","updated":1.0}'),
        ("step", fleet.LEDGER, b'{"run":"f1","what":"ended","by":"d","at":1.0}'),
        ("cancel", fleet.CANCEL, b'{"run":"f1","user":"u"}'),
        ("facts", fleet.FACTS, b'{"os":"linux","net":{"mtu":1500}}'),
        ("pong", PONG, b'{"beat":1,"state":"RUNNING","held":[["r",1,"x"]]}'),
        ("action", LINE, b'{"verb":"v","who":"w","host":"h","at":1.0}'),
        ("session", SESSION, b'{"name":"n","hash":"h","created":1.0}'),
        ("attempts", ATTEMPTS, b'[{"number":1,"node":"n"}]'),
        ("once", once.CODEC, b'{"state":"held","token":"t"}'),
        ("text", TEXT, b'"a text"'),
    ]  # fmt: skip
    return [Kind(*one) for one in found]


KINDS = kinds()
DAMAGE = {
    "nothing": b"",
    "text": b"hello",
    "not UTF-8": b'{"state":"\xff\xfe"}',
    "not UTF-8 in an unknown member": b'{"zz":"\xff"}',
    "deep lists": b"[" * 100_000,
    "deep objects": b'{"a":' * 100_000,
    "deep unknown member": b'{"zz":' + b"[" * 100_000,
    "a number": b"12",
    "null": b"null",
    "half": b'{"state":"runn',
    "a lone surrogate": b'{"error":"\\ud800"}',
    "a byte order mark": b"\xef\xbb\xbf{}",
    "NaN": b'{"at":NaN}',
    "nul bytes": b"\x00" * 64,
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.name)
def test_codec_says_unreadable_whatever_the_bytes_are(kind: Kind, damage: str) -> None:
    """Damage raises `Unreadable` and no other error, with one printable line."""
    with pytest.raises(Unreadable) as told:
        kind.codec.decode(DAMAGE[damage])
    said = str(told.value)
    assert said.isprintable()
    assert len(said) < 500


OBJECTS = [kind for kind in KINDS if kind.good.startswith(b"{")]


@pytest.mark.parametrize("kind", OBJECTS, ids=lambda k: k.name)
def test_codec_reads_what_a_newer_version_wrote(kind: Kind) -> None:
    """Members that are not known here are ignored, states too are open."""
    newer = kind.good.replace(b"{", b'{"added_later":{"deep":[1,2]},', 1)
    newer = newer.replace(b'"state":"running"', b'"state":"resting"')
    newer = newer.replace(b'"status":"running"', b'"status":"resting"')
    newer = newer.replace(b'"outcome":"ok"', b'"outcome":"resting"')
    found = msgspec.json.decode(kind.codec.encode(kind.codec.decode(newer)))
    known = msgspec.json.decode(kind.codec.encode(kind.codec.decode(kind.good)))
    changed = ("state", "status", "outcome")
    assert {k: found[k] for k in known if k not in changed} == {
        k: v for k, v in known.items() if k not in changed
    }


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.name)
@given(data=st.data())
@settings(deadline=None)  # about what is decoded, not how fast: a busy machine may pause
def test_codec_survives_mutations(kind: Kind, data: st.DataObject) -> None:
    """Good bytes with a few of them changed, cut or repeated give a record or `Unreadable`."""
    body = bytearray(kind.good)
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, max(0, len(body) - 1)))
        piece = data.draw(st.sampled_from(PIECES))
        body[at : at + data.draw(st.integers(0, 4))] = piece
    try:
        found = kind.codec.decode(bytes(body))
    except Unreadable:
        return
    kind.codec.encode(found)


PIECES = (
    b"",
    b"\xff",
    b"\x00",
    b"[" * 200,
    b"{",
    b'"',
    b"1e308",
    b"-1",
    b"9" * 400,
    b"null",
    b"\\ud800",
    b"\\u0000",
    b"\xe2\x80\xae",
    b"true",
)

INSTANTS = [
    (run.CODEC, b'{"state":"x","group":"g","job":"j","started":%s}'),
    (fleet.RETURN, b'{"run":"f1","agent":"a","outcome":"ok","at":%s}'),
    (node.CODEC, b'{"id":"n","role":"r","since":%s}'),
    (slot.CODEC, b'{"state":"x","due":%s}'),
    (schedule.CODEC, b'{"name":"n","job":"j","since":%s}'),
    (lease.LEASE, b'{"holder":"h","token":"t","since":%s}'),
    (LINE, b'{"verb":"v","who":"w","host":"h","at":%s}'),
]


@pytest.mark.parametrize("value", [b"1e308", b"-1e308", b"9" * 30, b"1e12", b"-1"])
@pytest.mark.parametrize(("kind", "form"), INSTANTS)
def test_codec_refuses_times_that_no_clock_shows(
    kind: Codec[Any], form: bytes, value: bytes
) -> None:
    """A time that cannot be shown as a date is no time."""
    kind.decode(form % b"1.5")
    with pytest.raises(Unreadable):
        kind.decode(form % value)


def test_codec_bounds_depth_where_any_value_may_stand() -> None:
    """What is deeper than a recursive function could walk is refused, at any place."""
    for kind, form in (
        (JSON, b"%s"),
        (fleet.FACTS, b'{"a":%s}'),
        (fleet.RETURN, b'{"run":"f","agent":"a","outcome":"ok","value":%s}'),
    ):
        kind.decode(form % (b"[" * (DEEPEST - 2) + b"]" * (DEEPEST - 2)))
        kind.decode(form % (b"[" + b"[]," * 1_000 + b"[]]"))
        for deep in (DEEPEST + 2, 600, 990, 100_000):
            with pytest.raises(Unreadable):
                kind.decode(form % (b"[" * deep + b"]" * deep))


def test_codec_bounds_size() -> None:
    """More than a record may have is not even parsed."""
    with pytest.raises(Unreadable, match="larger"):
        JSON.decode(b'"' + b"x" * LARGEST_BYTES + b'"')


@pytest.mark.parametrize(
    "reply", ["a b", "a\\r\\nPUB x 1", "a.*", "a.>", "caf\u00e9", "a\\u0000", "a\\n"]
)
def test_codec_refuses_addresses_that_would_be_more_than_one(reply: str) -> None:
    """What becomes a subject has neither blanks, nor wildcards, nor line breaks."""
    with pytest.raises(Unreadable):
        run.decode(b'{"state":"running","group":"g","job":"j","reply":"%s"}' % reply.encode())


@pytest.mark.parametrize(
    "headers",
    [
        '{"Nats-Rollup":"all"}',
        '{"nats-msg-id":"x"}',
        '{"Hf-Run":"x"}',
        '{"a":"b\\r\\nNats-TTL: 1"}',
    ],
)
def test_codec_refuses_headers_that_act(headers: str) -> None:
    """A schedule's headers travel with our login: none of them may speak to the server."""
    with pytest.raises(Unreadable):
        schedule.decode(b'{"name":"n","job":"j","headers":%s}' % headers.encode())
    with pytest.raises(Unreadable):
        slot.decode(b'{"state":"planned","due":1.0,"headers":%s}' % headers.encode())


def test_unreadable_is_no_error_of_the_broker() -> None:
    """Who tries again after an error of the broker would try for ever."""
    assert not issubclass(Unreadable, BrokerError)


def test_liveness_is_read_whatever_its_numbers_are() -> None:
    """Whether numbers can work is the node's own affair, not that of who reads its record."""
    found = node.decode(b'{"id":"n","role":"r","liveness":{"timeout_seconds":0.1}}')
    assert found.liveness.timeout_seconds == 0.1


@pytest.mark.parametrize(
    "rule",
    ['"cron":"nonsense"', '"cron":"* * * * *","tz":"Mars/Olympus"', '"every":0', '"every":5,"at":9',
     '"every":5,"limit":9007199254740992', '"every":5,"limit":0'],
)  # fmt: skip
def test_schedule_that_can_never_fire_is_unreadable(rule: str) -> None:
    """Whoever stored it did not define it: a scheduler passes it over."""
    with pytest.raises(Unreadable):
        schedule.usable("n", b'{"name":"n","job":"j",%s}' % rule.encode())
    with pytest.raises(Unreadable):
        schedule.usable("other", b'{"name":"n","job":"j","every":5}')


def test_states_of_a_newer_version_are_left_to_it() -> None:
    """A run in an unknown state is held, a node in one is alive and may be declared lost."""
    record = run.decode(b'{"state":"resting","group":"g","job":"j","node":"n"}')
    verdict = run.decide(record, message=1, holder_alive=False, crash_limit=3)
    assert verdict is run.Verdict.HELD
    running = run.decode(b'{"state":"running","group":"g","job":"j","restart":"by_moon"}')
    assert run.decide(running, message=1, holder_alive=False, crash_limit=3) is run.Verdict.HELD
    found = node.decode(b'{"id":"n","role":"r","state":"RESTING"}')
    assert found.alive
    assert not found.gone
    assert node.move(found, "DISCONNECTED", by="c", at=1.0).state == "DISCONNECTED"
    assert not slot.decode(b'{"state":"resting","due":1.0}').pending
    assert not fleet.decode_return(b'{"run":"f","agent":"a","outcome":"resting"}').ok


def test_codec_knows_where_values_may_be_nested() -> None:
    """Only types with a place for any value are looked through for their depth."""
    assert codec._nests(fleet.Return)
    assert not codec._nests(run.RunRecord)
    assert not codec._nests(node.NodeRecord)


def test_codec_keeps_deep_results_for_who_opens_them() -> None:
    """A result stays as the handler made it; only whoever looks inside has to bear its depth."""
    deep = b"[" * 600 + b"]" * 600
    found = run.decode(b'{"state":"done","group":"g","job":"j","result":%s}' % deep)
    assert bytes(found.result) == deep
    for bad in (b'"\xff"', b"[" * 100_000):
        with pytest.raises(Unreadable):
            run.decode(b'{"state":"done","group":"g","job":"j","result":%s}' % bad)
