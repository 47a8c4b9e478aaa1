"""Records on the wire: bytes that older and newer versions wrote are still read.

The golden bytes below are what a released version stores. Never change them: add new ones. When a
test here fails, two versions could not run side by side during a rollout.
"""

from __future__ import annotations

import msgspec
import pytest

from holdfast.model import node as nodes
from holdfast.model import run as runs
from holdfast.model.node import HeldRun, NodeRecord
from holdfast.model.run import Attempt, Progress, RunRecord

DONE = (
    b'{"state":"done","group":"mail","job":"send","message":3,"failures":1,"crashes":1,'
    b'"node":"worker-a-1-abc","token":"worker-a-1-abc.9","keyed":true,"created":1.5,'
    b'"started":2.5,"ended":4.25,"attempts":['
    b'{"number":1,"node":"worker-a-1-abc","epoch":7,"started":1.0,"ended":2.0,'
    b'"outcome":"failed","error":"ValueError: x"},'
    b'{"number":2,"node":"worker-b-2-def","started":2.0,"ended":2.4,"outcome":"crashed"},'
    b'{"number":3,"node":"worker-a-1-abc","epoch":12,"started":2.5,"ended":4.25,'
    b'"outcome":"done"}],"result":{"ok":true},"cause":"r1"}'
)
RUNNING = (
    b'{"state":"running","group":"default","job":"resize","node":"n","token":"n.1",'
    b'"reply":"$JS.ACK.x","restart":"never","progress":{"fraction":0.5,"note":"half","at":9.0}}'
)
NODE = (
    b'{"id":"worker-a-1-abc","role":"worker","group":"mail","state":"RUNNING","since":2.0,'
    b'"by":"worker-a-1-abc","host":"a","pid":1,"version":"0.1.0","started":1.5,"beat":4,'
    b'"running":2,"held":[["send/42",17,"$JS.ACK.x"]],"jobs":["send"]}'
)

DONE_RECORD = RunRecord(
    "done",
    "mail",
    "send",
    message=3,
    failures=1,
    crashes=1,
    node="worker-a-1-abc",
    token="worker-a-1-abc.9",
    keyed=True,
    created=1.5,
    started=2.5,
    ended=4.25,
    attempts=(
        Attempt(1, "worker-a-1-abc", 7, 1.0, 2.0, "failed", "ValueError: x"),
        Attempt(2, "worker-b-2-def", started=2.0, ended=2.4, outcome="crashed"),
        Attempt(3, "worker-a-1-abc", 12, 2.5, 4.25, "done"),
    ),
    result=msgspec.Raw(b'{"ok":true}'),
    cause="r1",
)
RUNNING_RECORD = RunRecord(
    "running",
    "default",
    "resize",
    node="n",
    token="n.1",
    reply="$JS.ACK.x",
    restart="never",
    progress=Progress(0.5, "half", 9.0),
)
NODE_RECORD = NodeRecord(
    "worker-a-1-abc",
    "worker",
    "mail",
    state="RUNNING",
    since=2.0,
    by="worker-a-1-abc",
    host="a",
    pid=1,
    version="0.1.0",
    started=1.5,
    beat=4,
    running=2,
    held=(HeldRun("send/42", 17, "$JS.ACK.x"),),
    jobs=("send",),
)


def plain(record: msgspec.Struct) -> object:
    return msgspec.json.decode(msgspec.json.encode(record))


@pytest.mark.parametrize(
    ("golden", "record"), [(DONE, DONE_RECORD), (RUNNING, RUNNING_RECORD)], ids=["done", "running"]
)
def test_run_record_is_stored_as_it_always_was(golden: bytes, record: RunRecord) -> None:
    """A worker of the last version reads what this one writes, and the other way round."""
    assert runs.encode(record) == golden
    assert plain(runs.decode(golden)) == plain(record)


def test_run_record_of_the_first_version_is_read() -> None:
    """Only state, group and job were always there; the rest has defaults."""
    record = runs.decode(b'{"state":"failed","group":"default","job":"send"}')
    assert plain(record) == plain(RunRecord("failed", "default", "send"))
    assert record.attempt == 1
    assert record.message == 1


def test_run_record_ignores_members_of_a_newer_version() -> None:
    """A newer version may add members anywhere; an older one reads past them."""
    newer = (
        b'{"state":"running","group":"default","job":"send","priority":{"high":true},'
        b'"attempts":[{"number":1,"node":"n","cpu":0.5}],'
        b'"progress":{"note":"half","eta":[1,2]}}'
    )
    record = runs.decode(newer)
    assert record.attempts == (Attempt(1, "n"),)
    assert record.progress == Progress(note="half")


def test_run_record_without_a_result_stores_none() -> None:
    """Defaults take no room: a queue of millions of records stays small."""
    assert runs.encode(RunRecord("running", "g", "j")) == (
        b'{"state":"running","group":"g","job":"j"}'
    )


def test_node_record_is_stored_as_it_always_was() -> None:
    """A coordinator of the last version reads what a node of this one writes."""
    assert nodes.encode(NODE_RECORD) == NODE
    assert nodes.decode(NODE) == NODE_RECORD


def test_node_record_ignores_members_of_a_newer_version() -> None:
    """Also inside the index of what it holds, which may grow at its end."""
    newer = b'{"id":"n","role":"worker","colour":"red","held":[["r1",3,"reply","more"]]}'
    record = nodes.decode(newer)
    assert (record.id, record.held) == ("n", (HeldRun("r1", 3, "reply"),))
