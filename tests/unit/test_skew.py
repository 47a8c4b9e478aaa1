"""Two versions side by side: every record of the version before, with every member it had.

`golden/records.json` was written by the code of the version before, each record with a value in
every member. Never change what is there: add new files. What this version reads and writes again
has the same members with the same values, so the version before reads it too; members that it does
not know it ignores.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.agent.journal import SEEN
from holdfast.model.codec import Codec
from holdfast.settings import records as settings
from holdfast.settings.resolving import SNAPSHOT
from tests.unit.test_codec import KINDS

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parent / "golden/records.json").read_text())
CODECS: dict[str, Codec[Any]] = {kind.name: kind.codec for kind in KINDS}
CODECS |= {"snapshot": SNAPSHOT, "journal": SEEN}
CODECS |= {
    kind.__name__.lower(): Codec(kind, "a record of the settings", strict=False)
    for kind in (settings.Manifest, settings.Revision, settings.Sealed, settings.Report)
}


def holds(found: Any, golden: Any) -> bool:
    """Whether a value has everything that an older one had."""
    if isinstance(golden, dict):
        return isinstance(found, dict) and all(
            key in found and holds(found[key], golden[key]) for key in golden
        )
    if isinstance(golden, list):
        return len(found) >= len(golden) and all(map(holds, found, golden))
    return bool(found == golden)


@pytest.mark.parametrize("kind", GOLDEN)
def test_record_of_the_version_before_survives_this_one(kind: str) -> None:
    """Read and written again it has every member that it had, so that both versions read it."""
    body = msgspec.json.encode(GOLDEN[kind])
    found = CODECS[kind].decode(body)
    assert holds(msgspec.json.decode(CODECS[kind].encode(found)), GOLDEN[kind])


@pytest.mark.parametrize("kind", GOLDEN)
def test_record_of_a_newer_version_is_read(kind: str) -> None:
    """Members that are not known here are ignored, at any place."""
    codec = CODECS[kind]
    found = codec.decode(msgspec.json.encode(_newer(GOLDEN[kind])))
    assert codec.encode(found) == codec.encode(codec.decode(msgspec.json.encode(GOLDEN[kind])))


def _newer(value: Any) -> Any:
    """The same with one member more in each record; maps and user's values stay as they are."""
    return {**value, "added_later": {"deep": [1, {"a": None}]}}
