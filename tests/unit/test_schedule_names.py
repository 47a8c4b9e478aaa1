"""Names of schedules and slots read back, and are mistaken for nothing else."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast.model.slot import slot_id, stamp
from holdfast.names import (
    check_run,
    keyed_run,
    parse_slot_key,
    parse_slot_run,
    slot_key,
    slot_run,
    trigger_run,
)

NAMES = st.from_regex(r"[a-zA-Z0-9][a-zA-Z0-9_-]{0,63}", fullmatch=True)
MOMENTS = st.integers(0, 4_102_444_799)


@given(NAMES, MOMENTS)
def test_slot_names_read_back(schedule: str, moment: int) -> None:
    """A slot's id and key give back what they were made of, and are valid run ids."""
    time = stamp(moment)
    assert check_run(slot_id(schedule, moment)) == slot_run(schedule, time)
    assert parse_slot_run(slot_run(schedule, time)) == (schedule, time)
    assert parse_slot_key(slot_key(schedule, time)) == (schedule, time)
    assert parse_slot_run(trigger_run(schedule, "r1")) is None


@given(NAMES, st.text(min_size=1), MOMENTS)
def test_no_key_is_mistaken_for_a_slot(job: str, key: str, moment: int) -> None:
    """Whatever key a user chooses: its run is not a slot of a schedule of the same name."""
    assert parse_slot_run(keyed_run("default", job, key)) is None
    assert keyed_run("default", job, f"=t{stamp(moment)}") != slot_id(job, moment)
    assert parse_slot_key(f"slot.{job}") is None
