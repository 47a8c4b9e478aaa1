"""Subject patterns in permissions: which one allows which."""

from __future__ import annotations


def covers(pattern: str, subject: str) -> bool:
    """Whether a pattern allows everything in `subject`, which may contain wildcards."""
    wanted, given = pattern.split("."), subject.split(".")
    for number, part in enumerate(wanted):
        if part == ">":
            return len(given) > number
        if number >= len(given) or given[number] == ">":
            return False
        if part != "*" and part != given[number]:
            return False
    return len(wanted) == len(given)


def overlaps(one: str, other: str) -> bool:
    """Whether some subject matches both patterns."""
    left, right = one.split("."), other.split(".")
    for a, b in zip(left, right, strict=False):
        if ">" in (a, b):
            return True
        if a != b and "*" not in (a, b):
            return False
    return len(left) == len(right)
